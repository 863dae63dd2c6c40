//! Options, values and defaults in `bench/README.md` match the program.

use std::collections::BTreeSet;

use clap::{Arg, Command, CommandFactory, Parser};

use super::Cli;

const README: &str = include_str!("../../README.md");
const TESTS: &[&str] = &["lat", "rate", "bw", "raw-lat", "raw-bw"];
/// Tests of calls, and their server: "calls" in the README.
const CALLS: &[&str] = &["lat", "rate", "bw", "serve"];
/// Options of cargo and of the example `tcp`, which the README mentions too.
const FOREIGN_OPTIONS: &[&str] = &["--features", "--sleep"];
/// Options whose defaults another test compares with the README's table of tests.
const IN_TEST_TABLE: &[(&str, &[&str])] =
    &[("op", TESTS), ("outstanding", CALLS), ("tx_depth", TESTS), ("cq_mod", TESTS)];

fn program() -> Command {
    let mut program = Cli::command();
    program.build();
    program
}

fn find_command<'a>(program: &'a Command, name: &str) -> &'a Command {
    program.find_subcommand(name).unwrap_or_else(|| panic!("rpcperf has no command {name}"))
}

/// The option `-x` or `--name` of a command.
fn find_option<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| match name.strip_prefix("--") {
        Some(long) => arg.get_long() == Some(long),
        None => arg.get_short().is_some_and(|short| name == format!("-{short}")),
    })
}

/// The default from clap, or from the help text if it depends on other options.
fn default_text(arg: &Arg) -> Option<String> {
    if let [value] = arg.get_default_values() {
        return Some(format!("`{}`", value.to_string_lossy()));
    }
    let help = arg.get_help()?.to_string();
    let (_, rest) = help.split_once("(default: ")?;
    Some(rest.split_once(')')?.0.to_owned())
}

/// Code in the README: lines of blocks, and spans.
fn readme_code() -> (Vec<&'static str>, Vec<&'static str>) {
    let (mut lines, mut spans) = (Vec::new(), Vec::new());
    for (n, part) in README.split("```").enumerate() {
        if n % 2 == 1 {
            lines.extend(part.lines());
        } else {
            spans.extend(part.split('`').skip(1).step_by(2));
        }
    }
    (lines, spans)
}

#[test]
fn defaults_in_the_readme_match_the_program() {
    let program = program();
    let (_, table) = README.split_once("| option | of | default |\n| --- | --- | --- |\n").expect("the table");
    let mut stated = BTreeSet::new();
    for row in table.lines().take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [name, of, value] = cells[..] else { panic!("{row}") };
        let commands = match of {
            "tests" => TESTS,
            "calls" => CALLS,
            "`serve`" => &["serve"],
            _ => panic!("{row}: expected `tests`, `calls` or `serve` in the column `of`"),
        };
        let mut found = 0;
        for command in commands {
            let arg = find_option(find_command(&program, command), name.trim_matches('`'));
            let arg = arg.unwrap_or_else(|| panic!("{row}: {command} has no such option"));
            assert_eq!(default_text(arg).as_deref(), Some(value), "{row}: the default of {command} (left)");
            stated.insert((*command, arg.get_id().to_string()));
            found += 1;
        }
        assert!(found > 0, "{row}");
    }
    assert!(stated.len() > 50, "only {} defaults are stated", stated.len());
    // The README states all defaults.
    for command in TESTS.iter().chain(&["serve"]) {
        for arg in find_command(&program, command).get_arguments() {
            let id = arg.get_id().as_str();
            let is_in_test_table = *command != "serve"
                && IN_TEST_TABLE.iter().any(|(option, commands)| *option == id && commands.contains(command));
            if !arg.get_default_values().is_empty() && arg.get_action().takes_values() && !is_in_test_table {
                assert!(
                    stated.contains(&(*command, id.to_owned())),
                    "the README does not state the default of {id} of {command}"
                );
            }
        }
    }
}

#[test]
fn options_and_values_in_the_readme_exist() {
    let program = program();
    let commands: Vec<&Command> = program.get_subcommands().collect();
    let (mut options, mut values) = (0, 0);
    for span in readme_code().1 {
        let mut words = span.split(' ').peekable();
        while let Some(word) = words.next() {
            let name = word.split('=').next().unwrap_or(word);
            if !name.starts_with('-') || name == "-" || FOREIGN_OPTIONS.contains(&name) {
                continue;
            }
            let named: Vec<&Arg> = commands.iter().filter_map(|command| find_option(command, name)).collect();
            assert!(!named.is_empty(), "`{span}`: no command has {name}");
            options += 1;
            let possible: BTreeSet<String> =
                named.iter().flat_map(|arg| arg.get_possible_values()).map(|value| value.get_name().into()).collect();
            let Some(value) = words.peek().filter(|value| !value.starts_with('-') && !possible.is_empty()) else {
                continue;
            };
            for value in value.split('|') {
                assert!(possible.contains(value), "`{span}`: {name} has {possible:?}");
                values += 1;
            }
        }
    }
    assert!(options > 60 && values > 10, "only {options} options and {values} values are named");
}

#[test]
fn commands_in_the_readme_are_valid() {
    let mut parsed = 0;
    for line in readme_code().0 {
        let line = line.split('#').next().unwrap_or(line).split(" | ").next().unwrap_or(line).trim();
        if line.starts_with("rpcperf ") {
            if let Err(error) = Cli::try_parse_from(line.split_whitespace()) {
                panic!("{line}: {error}");
            }
            parsed += 1;
        }
    }
    assert!(parsed > 5, "only {parsed} commands are in the README");
}
