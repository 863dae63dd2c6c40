//! Manual pages and shell completions of the packaged programs, from the definitions of their command lines.
//!
//! This is a separate crate so that the programs do not depend on the generators.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

/// Returns the programs, each with the manual section of its pages.
pub fn programs() -> [(Command, &'static str); 3] {
    [
        (rpcrdma_tools::cli::command_line(), "1"),
        (rpcrdma_bench::command_line(), "1"),
        (rpcrdma_nfs3d::daemon::command_line(), "8"),
    ]
}

/// Writes `man/NAME.SECTION` for each program and subcommand, and `completions/SHELL/` for each program.
///
/// # Errors
/// A file or directory cannot be written.
pub fn write(directory: &Path) -> io::Result<()> {
    let man = directory.join("man");
    fs::create_dir_all(&man)?;
    for (program, section) in programs() {
        let name = program.get_name().to_owned();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let completions = directory.join("completions").join(shell.to_string());
            fs::create_dir_all(&completions)?;
            clap_complete::generate_to(shell, &mut program.clone(), &name, completions)?;
        }
        let source = format!("{name} {}", program.get_version().unwrap_or_default());
        // The long version names a commit, but the pages must be identical in all builds of a version.
        let mut program = program.long_version(None).disable_help_subcommand(true);
        program.build();
        write_pages(program, section, &source, &man)?;
    }
    Ok(())
}

/// Writes the pages of a command and its subcommands.
fn write_pages(command: Command, section: &str, source: &str, directory: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        write_pages(subcommand.clone(), section, source, directory)?;
    }
    let page = Man::new(command).section(section).source(source);
    let mut text = Vec::new();
    page.render(&mut text)?;
    // The text after the options has examples and exit statuses.
    let text = String::from_utf8_lossy(&text).replace("\n.SH EXTRA\n", "\n.SH NOTES\n");
    fs::write(directory.join(page.get_filename()), text)
}
