//! Lines of the C preprocessor, as the crate's documentation has them.

use std::collections::HashMap;
use std::mem;
use std::ops::Range;

use crate::errors::Problems;
use crate::lexer::{in_range, is_word_char, number};
use crate::schema::{Constant, Name};

/// State of the preprocessor.
#[derive(Default)]
pub(crate) struct Preprocessor<'s> {
    /// Constants of `#define` lines.
    pub(crate) constants: Vec<Constant>,
    /// Constants of `%#define` lines.
    pub(crate) hidden: HashMap<&'s str, i128>,
    /// Names of all `#define` lines, and their values.
    defined: HashMap<&'s str, Option<i128>>,
    /// The `#if` lines around the current one.
    branches: Vec<Branch>,
    /// How many of them skip lines.
    skipping: usize,
}

/// The `#if` lines around the line of a file that includes another one.
pub(crate) struct Conditions {
    branches: Vec<Branch>,
    skipping: usize,
}

struct Branch {
    at: Range<usize>,
    /// The lines that follow count.
    active: bool,
    /// The lines of a part counted.
    taken: bool,
}

impl<'s> Preprocessor<'s> {
    /// Whether lines are skipped.
    pub(crate) fn is_skipping(&self) -> bool {
        self.skipping > 0
    }

    /// A state that knows names, each as `NAME` or `NAME=VALUE`. They are not constants of the specification.
    pub(crate) fn new(defines: &'s [String]) -> Self {
        let mut new = Self::default();
        for define in defines {
            let (name, value) =
                define.split_once('=').map_or((&**define, Some(1)), |(name, value)| (name, number(value)));
            new.defined.insert(name, value);
            value.map(|value| new.hidden.insert(name, value));
        }
        new
    }

    /// Begins an included file, which its own conditions alone skip. Returns those of the file that includes it.
    pub(crate) fn enter(&mut self) -> Conditions {
        Conditions { branches: mem::take(&mut self.branches), skipping: mem::take(&mut self.skipping) }
    }

    /// Ends a file, and reports a condition without end.
    pub(crate) fn leave(&mut self, Conditions { branches, skipping }: Conditions, problems: &mut Problems) {
        if let Some(branch) = self.branches.first() {
            problems.add(&branch.at, "this condition has no `#endif`");
        }
        (self.branches, self.skipping) = (branches, skipping);
    }

    /// Reads a line that starts with `#` or `%`.
    pub(crate) fn line(&mut self, line: &'s str, at: Range<usize>, problems: &mut Problems) {
        let code = line.split("/*").next().unwrap_or_default().split("//").next().unwrap_or_default();
        let hidden = code.starts_with('%');
        let code = code.trim_start_matches('%').trim_start().trim_start_matches('#').trim();
        let (name, rest) = code.split_at(code.find(|c| !is_word_char(c)).unwrap_or(code.len()));
        let rest = rest.trim();
        match name {
            "define" if hidden || !self.is_skipping() => self.define(rest, line, &at, hidden),
            _ if hidden => {}
            "if" | "ifdef" | "ifndef" => {
                let active = self.condition(name, rest, &at, problems);
                self.skipping += usize::from(!active);
                self.branches.push(Branch { at, active, taken: active });
            }
            "else" | "elif" | "endif" => {
                let Some(mut branch) = self.branches.pop() else {
                    problems.add(&at, format!("`#{name}` without `#if`"));
                    return;
                };
                self.skipping -= usize::from(!branch.active);
                if name != "endif" {
                    branch.active = !branch.taken && (name == "else" || self.condition("if", rest, &at, problems));
                    branch.taken |= branch.active;
                    self.skipping += usize::from(!branch.active);
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
            "pragma" | "ident" | "undef" | "line" | "error" | "warning" | "" => {}
            _ => drop(problems.add(&at, format!("unknown preprocessor line `#{name}`"))),
        }
    }

    fn condition(&self, directive: &str, text: &str, at: &Range<usize>, problems: &mut Problems) -> bool {
        let (negated, text) = text.strip_prefix('!').map_or((false, text), |text| (true, text.trim()));
        let (is_defined, text) = match text.strip_prefix("defined").filter(|_| directive == "if") {
            Some(name) => (true, name.trim().trim_start_matches('(').trim_end_matches(')').trim()),
            None => (directive != "if", text),
        };
        let value = if is_defined {
            self.defined.contains_key(text)
        } else if let Some(value) = number(text) {
            value != 0
        } else {
            self.defined.get(text).copied().flatten().is_some_and(|value| value != 0)
        };
        if number(text).is_none() && !text.chars().all(is_word_char) && !self.is_skipping() {
            problems.add(at, "unsupported condition").help("supported: a number, a name, `defined(NAME)`, `!`");
        }
        value != (negated != (directive == "ifndef"))
    }

    fn define(&mut self, rest: &'s str, line: &'s str, at: &Range<usize>, hidden: bool) {
        let (name, value) = rest.split_at(rest.find(|c| !is_word_char(c)).unwrap_or(rest.len()));
        let part = |part: &str| {
            let part = part.trim();
            let known = self.defined.get(part).copied().flatten().or_else(|| self.hidden.get(part).copied());
            number(part).or(known)
        };
        let value = value.split('+').try_fold(0_i128, |sum, text| in_range(sum + part(text)?));
        if !hidden {
            self.defined.insert(name, value);
        }
        match value {
            Some(value) if hidden => drop(self.hidden.insert(name, value)),
            Some(value) if !name.is_empty() => {
                let start = at.start + (name.as_ptr() as usize - line.as_ptr() as usize);
                let name = Name::new(name, start..start + name.len());
                self.constants.push(Constant { name, value });
            }
            _ => {}
        }
    }
}
