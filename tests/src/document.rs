//! Reader of this repository's documents: sections, tables, blocks.

/// The part below a heading, up to the next heading of the same or a higher level.
///
/// # Panics
/// If the heading is missing.
pub fn section(document: &str, heading: &str) -> String {
    let level = heading.bytes().take_while(|&b| b == b'#').count();
    let ends = |line: &str| line.starts_with('#') && line.bytes().take_while(|&b| b == b'#').count() <= level;
    let mut lines = document.lines().skip_while(|line| *line != heading);
    assert!(lines.next().is_some(), "there is no heading {heading:?}");
    lines.take_while(|line| !ends(line)).collect::<Vec<_>>().join("\n")
}

/// Rows of all tables in a text, without the header rows, as trimmed cells.
pub fn rows(text: &str) -> Vec<Vec<String>> {
    let cells = |line: &str| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect();
    let mut rows = Vec::new();
    let mut in_table = false;
    for line in text.lines() {
        if line.starts_with("| ---") || line.starts_with("|---") {
            in_table = true;
        } else if !line.starts_with('|') {
            in_table = false;
        } else if in_table {
            rows.push(cells(line));
        }
    }
    rows
}

/// A fenced block of a document.
pub struct Block {
    /// Line of its fence, from 1.
    pub line: usize,
    /// Words after the fence: the language, and the use of the block.
    pub info: String,
    /// Content.
    pub text: String,
}

/// Fenced blocks of a document, in order.
///
/// # Panics
/// If a block has no end.
pub fn blocks(document: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = (1..).zip(document.lines());
    while let Some((line, fence)) = lines.next() {
        let Some(info) = fence.strip_prefix("```") else { continue };
        let mut text = String::new();
        loop {
            let (_, inner) = lines.next().unwrap_or_else(|| panic!("the block of line {line} has no end"));
            if inner == "```" {
                break;
            }
            text.push_str(inner);
            text.push('\n');
        }
        blocks.push(Block { line, info: info.to_owned(), text });
    }
    blocks
}

/// Documents whose commands `tests/documents.rs` runs.
pub const COMMANDS: &[&str] = &[
    "README.md",
    "tools/README.md",
    "deploy/README.md",
    "deploy/nfs.md",
    "deploy/hardware.md",
    "deploy/iwarp.md",
    "deploy/containers.md",
    "tools/config/README.md",
    "tools/host/README.md",
    "tools/nfs3d/README.md",
    "tools/rpcbind/README.md",
    "tools/blockstore/README.md",
    "tools/xdrgen/README.md",
];

/// Where a block's commands run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runner {
    /// This host.
    Host,
    /// The virtual machine, which has the device `rxe0`.
    Machine,
    /// The virtual machine, if it has the soft-iWARP driver.
    SoftIwarp,
    /// Another host in the virtual machine: a network namespace without a device.
    Server,
    /// Nowhere, for the reason in the document.
    NotRun,
}

impl Block {
    /// Where the commands of the block run; `None` if it has no commands.
    ///
    /// # Panics
    /// If the fence is invalid.
    pub fn runner(&self) -> Option<Runner> {
        let runner = match self.info.strip_prefix("sh")?.trim_start() {
            "" => Runner::Host,
            "vm" => Runner::Machine,
            "vm siw" => Runner::SoftIwarp,
            "vm server" => Runner::Server,
            reason if reason.strip_prefix("not run: ").is_some_and(|reason| reason.len() > 10) => Runner::NotRun,
            _ => panic!("line {}: invalid words {:?} after the fence of a block of commands", self.line, self.info),
        };
        Some(runner)
    }
}
