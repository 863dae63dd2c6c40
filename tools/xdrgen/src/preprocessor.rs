//! Lines of the C preprocessor, as described in the crate's documentation.

use std::collections::{HashMap, HashSet};
use std::mem;
use std::ops::Range;

use crate::errors::Problems;
use crate::lexer::{InvalidNumber, in_range, is_word_char, parse_number};
use crate::schema::{Constant, Name};

/// State of the preprocessor.
#[derive(Default)]
pub(crate) struct Preprocessor<'s> {
    /// Constants of `#define` lines.
    pub(crate) constants: HashMap<&'s str, Vec<Constant>>,
    /// Constants of `%#define` lines.
    pub(crate) hidden: HashMap<&'s str, i128>,
    /// Names that options and `#define` lines have defined and no `#undef` line has ended, with their values.
    defined: HashMap<&'s str, Option<i128>>,
    /// Options by the names that they define.
    pub(crate) options: HashMap<&'s str, &'s str>,
    /// Names that are used in the values of `#define` lines.
    summands: HashSet<&'s str>,
    /// Values that an `#undef` line has ended, each with the number of tokens before that line.
    ended: HashMap<&'s str, Vec<(usize, i128)>>,
    /// The `#if` lines around the current line.
    branches: Vec<Branch>,
    /// Number of branches that skip lines.
    skipping: usize,
}

/// The `#if` lines around a line that includes a file.
pub(crate) struct Conditions {
    branches: Vec<Branch>,
    skipping: usize,
}

struct Branch {
    at: Range<usize>,
    /// Whether the current lines are read rather than skipped.
    is_active: bool,
    /// Whether some part of the condition was active.
    was_active: bool,
}

impl<'s> Preprocessor<'s> {
    /// Whether lines are being skipped.
    pub(crate) fn is_skipping(&self) -> bool {
        self.skipping > 0
    }

    /// Creates a state with the definitions of options, which are valid. They are not constants of the specification.
    pub(crate) fn new(defines: &'s [String]) -> Self {
        let mut new = Self::default();
        for define in defines {
            let Ok((name, value)) = parse_option(define) else { continue };
            new.defined.insert(name, Some(value));
            new.hidden.insert(name, value);
            new.options.insert(name, define);
        }
        new
    }

    /// Begins an included file, in which only its own conditions skip lines. Returns those of the including file.
    pub(crate) fn enter(&mut self) -> Conditions {
        Conditions { branches: mem::take(&mut self.branches), skipping: mem::take(&mut self.skipping) }
    }

    /// Ends a file, and reports a condition without `#endif`.
    pub(crate) fn leave(&mut self, Conditions { branches, skipping }: Conditions, problems: &mut Problems) {
        if let Some(branch) = self.branches.first() {
            problems.add(&branch.at, "this condition has no `#endif`");
        }
        (self.branches, self.skipping) = (branches, skipping);
    }

    /// The value of a token whose definition a later `#undef` line has ended. `index` tokens precede it.
    pub(crate) fn ended_value(&self, name: &str, index: usize) -> Option<i128> {
        let ended = self.ended.get(name)?;
        ended.get(ended.partition_point(|(end, _)| *end <= index)).map(|(_, value)| *value)
    }

    /// Reads a line that starts with `#` or `%`. `tokens` is the number of tokens before it.
    pub(crate) fn read_line(&mut self, line: &'s str, at: Range<usize>, tokens: usize, problems: &mut Problems) {
        let code = line.split("/*").next().unwrap_or_default().split("//").next().unwrap_or_default();
        let hidden = code.starts_with('%');
        let code = code.trim_start_matches('%').trim_start().trim_start_matches('#').trim();
        let text = line.trim_start_matches(['#', '%', ' ', '\t']);
        let (name, rest) = code.split_at(code.find(|c| !is_word_char(c)).unwrap_or(code.len()));
        let rest = rest.trim();
        match name {
            "define" if hidden || !self.is_skipping() => self.define(rest, line, &at, hidden, problems),
            _ if hidden => {}
            "if" | "ifdef" | "ifndef" => {
                let is_active = self.evaluate(name, rest, &at, problems);
                self.skipping += usize::from(!is_active);
                self.branches.push(Branch { at, is_active, was_active: is_active });
            }
            "else" | "elif" | "elifdef" | "elifndef" | "endif" => {
                let Some(mut branch) = self.branches.pop() else {
                    problems.add(&at, format!("`#{name}` without `#if`"));
                    return;
                };
                self.skipping -= usize::from(!branch.is_active);
                if name != "endif" {
                    branch.is_active =
                        !branch.was_active && (name == "else" || self.evaluate(&name[2..], rest, &at, problems));
                    branch.was_active |= branch.is_active;
                    self.skipping += usize::from(!branch.is_active);
                    self.branches.push(branch);
                }
            }
            _ if self.is_skipping() => {}
            "include" => {
                problems.warn(
                    &at,
                    format!("`#{}` is dropped: copy the definitions of that file into this one", code.trim()),
                );
            }
            "undef" if is_name(rest) => self.undefine(rest, tokens),
            "undef" => drop(problems.add(&at, format!("invalid name `{rest}` in `#undef`"))),
            "error" => drop(problems.add(&at, format!("#{}", join_lines(text)))),
            "warning" => problems.warn(&at, format!("#{}", join_lines(text))),
            "pragma" | "line" if rest != "once" => problems.warn(&at, format!("`#{}` is ignored", join_lines(text))),
            "pragma" | "ident" | "" => {}
            _ => drop(problems.add(&at, format!("unknown preprocessor line `#{name}`"))),
        }
    }

    fn evaluate(&self, directive: &str, text: &str, at: &Range<usize>, problems: &mut Problems) -> bool {
        let (negated, text) = text.strip_prefix('!').map_or((false, text), |text| (true, text.trim()));
        let defined = text.strip_prefix("defined").filter(|rest| directive == "if" && !rest.starts_with(is_word_char));
        let (is_defined, text) = match defined {
            Some(name) => (true, name.trim().trim_start_matches('(').trim_end_matches(')').trim()),
            None => (directive != "if", text),
        };
        let value = match (parse_number(text), self.defined.get(text)) {
            (_, known) if is_defined && is_name(text) => Some(known.is_some()),
            (Ok(value), _) if !is_defined => Some(value != 0),
            (Err(InvalidNumber::Form), known) if is_name(text) => {
                known.map_or(Some(false), |known| known.map(|value| value != 0))
            }
            _ => None,
        };
        if value.is_none() && !self.is_skipping() {
            let help = "supported: a number of 64 bits, a name of such a number, `defined(NAME)`, `!`";
            problems.add(at, "unsupported condition").help(help);
        }
        value.unwrap_or(false) != (negated != (directive == "ifndef"))
    }

    fn define(&mut self, rest: &'s str, line: &'s str, at: &Range<usize>, hidden: bool, problems: &mut Problems) {
        let (name, text) = rest.split_at(rest.find(|c| !is_word_char(c)).unwrap_or(rest.len()));
        let problem = match self.options.get(name) {
            _ if !is_name(name) => Some("`#define` without a name".into()),
            Some(option) => Some(defined_by_option(name, option)),
            None => None,
        };
        if let Some(problem) = problem {
            // A definition in C code has no effect here.
            if !hidden {
                problems.add(at, problem);
            }
            return;
        }
        let part = |part: &str| {
            let part = part.trim();
            let known = self.defined.get(part).copied().flatten().or_else(|| self.hidden.get(part).copied());
            match parse_number(part) {
                Ok(value) => Some(value),
                // This value makes any sum too large.
                Err(InvalidNumber::Range) => Some(i128::MAX / 2),
                Err(InvalidNumber::Form) => known,
            }
        };
        let sum = text.split('+').try_fold(0_i128, |sum, text| Some(sum.saturating_add(part(text)?)));
        let value = sum.and_then(in_range);
        if !hidden {
            if sum.is_some() && value.is_none() {
                problems.add(at, format!("value of `{name}` exceeds 64 bits"));
            }
            let is_other = |(_, last): &&(usize, i128)| Some(*last) != value;
            if self.summands.contains(name)
                && self.ended.get(name).and_then(|ended| ended.last().filter(is_other)).is_some()
            {
                let message = format!("`{name}` has a new value, but another `#define` line uses the last one");
                problems.add(at, message);
            }
            self.summands.extend(text.split('+').map(str::trim).filter(|part| self.defined.contains_key(part)));
            self.defined.insert(name, value);
        }
        match value {
            Some(value) if hidden => drop(self.hidden.insert(name, value)),
            Some(value) => {
                let start = at.start + (name.as_ptr() as usize - line.as_ptr() as usize);
                let constant = Constant { name: Name::new(name, start..start + name.len()), value };
                self.constants.entry(name).or_default().push(constant);
            }
            None => {}
        }
    }

    /// Ends the definition of a name. Earlier tokens keep its value.
    fn undefine(&mut self, name: &'s str, tokens: usize) {
        let Some(value) = self.defined.remove(name) else { return };
        if let Some(value) = value {
            self.ended.entry(name).or_default().push((tokens, value));
        }
        if self.options.remove(name).is_some() {
            self.hidden.remove(name);
        }
        self.constants.remove(name);
    }
}

/// Parses an option `NAME` or `NAME=VALUE`. The error says why it is invalid.
pub(crate) fn parse_option(define: &str) -> Result<(&str, i128), String> {
    let (name, value) = define.split_once('=').unwrap_or((define, "1"));
    if !is_name(name) {
        return Err(format!("`{name}` is not a name"));
    }
    parse_number(value).map(|value| (name, value)).map_err(|_| format!("`{value}` is not an integer of 64 bits"))
}

/// The message about a name that the file and an option define.
pub(crate) fn defined_by_option(name: &str, option: &str) -> String {
    format!("`{name}` is also defined by the option `-D {option}`")
}

/// Joins a line and its continuation lines.
fn join_lines(text: &str) -> String {
    text.lines().map(|line| line.trim_end_matches('\\').trim()).collect::<Vec<_>>().join(" ")
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| is_word_char(c) && !c.is_ascii_digit()) && text.chars().all(is_word_char)
}
