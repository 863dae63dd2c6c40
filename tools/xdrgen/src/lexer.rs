//! Lexer: splits files into words, numbers and signs, with the comments that document them.

use std::collections::HashSet;
use std::ops::Range;

use winnow::ascii::till_line_ending;
use winnow::combinator::{alt, delimited, opt};
use winnow::prelude::*;
use winnow::stream::{LocatingSlice, Location, Stream};
use winnow::token::{one_of, take_till, take_until, take_while};

use crate::errors::Problems;
use crate::preprocessor::Preprocessor;
use crate::sources::{Include, Sources, parse_include};

/// Kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Word,
    Number,
    Text,
    Sign,
    Comment,
}

/// A word, number, string or sign.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token<'s> {
    pub(crate) kind: TokenKind,
    pub(crate) text: &'s str,
    pub(crate) at: Range<usize>,
    /// The value of a constant whose definition a later `#undef` line has ended.
    pub(crate) value: Option<i128>,
    /// Lines of the comments directly before the token.
    pub(crate) before: Vec<String>,
    /// Lines of the comments after the token, on its line.
    pub(crate) after: Vec<String>,
}

/// Limit of nested files.
const MAX_DEPTH: usize = 16;

/// Splits a specification into tokens. Included files replace the lines that include them.
pub(crate) fn lex<'s>(
    sources: &'s Sources,
    defines: &'s [String],
    problems: &mut Problems,
) -> (Vec<Token<'s>>, Preprocessor<'s>) {
    let mut lexer = Lexer {
        sources,
        tokens: Vec::new(),
        preprocessor: Preprocessor::new(defines),
        open: Vec::new(),
        begun: HashSet::new(),
        problems,
    };
    lexer.lex_file(0);
    for (index, token) in lexer.tokens.iter_mut().enumerate() {
        token.value = lexer.preprocessor.ended_value(token.text, index);
    }
    (lexer.tokens, lexer.preprocessor)
}

struct Lexer<'s, 'p> {
    sources: &'s Sources,
    tokens: Vec<Token<'s>>,
    preprocessor: Preprocessor<'s>,
    /// Indices of the files that are being read, each included by the previous one.
    open: Vec<usize>,
    /// Indices of all files that have been begun.
    begun: HashSet<usize>,
    problems: &'p mut Problems,
}

impl<'s> Lexer<'s, '_> {
    fn lex_file(&mut self, index: usize) {
        self.open.push(index);
        self.begun.insert(index);
        let conditions = self.preprocessor.enter();
        let (text, base) = self.sources.file(index);
        let first = self.tokens.len();
        let mut input = LocatingSlice::new(text);
        let mut comments: Vec<String> = Vec::new();
        let mut starts_line = true;
        loop {
            let space = take_space(&mut input);
            starts_line |= space.contains('\n');
            if space.matches('\n').nth(1).is_some() {
                comments.clear();
            }
            if input.is_empty() {
                break;
            }
            if starts_line && (self.preprocessor.is_skipping() || input.starts_with(['#', '%'])) {
                let (line, at) = take_line(&mut input);
                let at = base + at.start..base + at.end;
                match parse_include(line).filter(|include| include.has_percent || !self.preprocessor.is_skipping()) {
                    Some(include) if self.include(include, &at) => {}
                    _ if line.starts_with(['#', '%']) => {
                        self.preprocessor.read_line(line, at, self.tokens.len(), self.problems);
                    }
                    _ => {}
                }
                comments.clear();
                continue;
            }
            let start = input.current_token_start();
            let Ok((kind, at)) = token.with_span().parse_next(&mut input) else {
                let len = report_bad_token(text, start, base, self.problems);
                input.next_slice(len);
                continue;
            };
            let (text, at) = (&text[at.clone()], base + at.start..base + at.end);
            // A comment after an included file does not belong to the last token of that file.
            match (kind, self.tokens[first..].last_mut()) {
                (TokenKind::Comment, Some(last)) if !starts_line => last.after.extend(comment_lines(text)),
                (TokenKind::Comment, _) => comments.extend(comment_lines(text)),
                _ => {
                    let before = std::mem::take(&mut comments);
                    self.tokens.push(Token { kind, text, at, value: None, before, after: Vec::new() });
                    starts_line = false;
                }
            }
        }
        self.preprocessor.leave(conditions, self.problems);
        self.open.pop();
    }

    /// Reads the file that a line includes, unless it was read before. Returns false if the line does not include
    /// a specification.
    fn include(&mut self, include: Include<'s>, at: &Range<usize>) -> bool {
        let by = self.open[self.open.len() - 1];
        let message = match self.sources.included(by, include.path) {
            None => return false,
            Some(Err(error)) => format!("cannot include `{}`: {error}", include.path),
            Some(Ok(index)) if self.open.contains(index) && !include.is_c() => {
                format!("`{}` includes itself, directly or by other files", include.path)
            }
            Some(Ok(_)) if self.open.len() == MAX_DEPTH => {
                format!("including `{}` exceeds {MAX_DEPTH} nested files", include.path)
            }
            Some(&Ok(index)) => {
                if !self.begun.contains(&index) {
                    self.lex_file(index);
                }
                return true;
            }
        };
        self.problems.add(at, message);
        true
    }
}

/// Why a text is not a number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum InvalidNumber {
    /// The text does not have the form of a number.
    Form,
    /// The number exceeds 64 bits.
    Range,
}

/// Parses a number: decimal, `0x…` or `0…`, with an optional sign.
pub(crate) fn parse_number(text: &str) -> Result<i128, InvalidNumber> {
    let (sign, digits) = text.strip_prefix('-').map_or(("", text), |digits| ("-", digits));
    let (radix, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return Err(InvalidNumber::Form);
    }
    let value = i128::from_str_radix(&format!("{sign}{digits}"), radix).ok();
    value.and_then(in_range).ok_or(InvalidNumber::Range)
}

/// Returns `value`, if it is in the range of `hyper` or `unsigned hyper`.
pub(crate) fn in_range(value: i128) -> Option<i128> {
    Some(value).filter(|value| (i64::MIN.into()..=u64::MAX.into()).contains(value))
}

/// Reports text that is not a token. Returns the number of bytes to skip.
fn report_bad_token(text: &str, start: usize, base: usize, problems: &mut Problems) -> usize {
    let rest = &text[start..];
    let char_len = rest.chars().next().map_or(0, char::len_utf8);
    let (message, marked, len) = if rest.starts_with("/*") {
        ("unterminated comment".into(), 2, rest.len())
    } else if rest.starts_with('"') {
        ("unterminated string".into(), 1, rest.find('\n').unwrap_or(rest.len()))
    } else {
        (format!("unexpected character `{}`", rest[..char_len].escape_debug()), char_len, char_len)
    };
    problems.add(&(base + start..base + start + marked), message);
    len
}

pub(crate) fn is_word_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn take_space<'s>(input: &mut LocatingSlice<&'s str>) -> &'s str {
    let len = input.len() - input.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}').len();
    input.next_slice(len)
}

/// Takes a line, with the lines that continue it.
fn take_line<'s>(input: &mut LocatingSlice<&'s str>) -> (&'s str, Range<usize>) {
    let rest: &'s str = input.as_ref();
    let mut end = 0;
    for part in rest.split_inclusive('\n') {
        end += part.len();
        if !part.trim_end().ends_with('\\') {
            break;
        }
    }
    let text = rest[..end].trim_end();
    let start = input.current_token_start();
    let _ = input.next_slice(text.len());
    (text, start..start + text.len())
}

fn token(input: &mut LocatingSlice<&str>) -> winnow::Result<TokenKind> {
    alt((
        (one_of(('a'..='z', 'A'..='Z', '_')), take_while(0.., is_word_char)).value(TokenKind::Word),
        (opt('-'), one_of('0'..='9'), take_while(0.., is_word_char)).value(TokenKind::Number),
        delimited('"', take_till(0.., ['"', '\n']), '"').value(TokenKind::Text),
        ("/*", take_until(0.., "*/"), "*/").value(TokenKind::Comment),
        ("//", till_line_ending).value(TokenKind::Comment),
        one_of(['{', '}', '(', ')', '[', ']', '<', '>', ';', ':', ',', '=', '*']).value(TokenKind::Sign),
    ))
    .parse_next(input)
}

/// The lines of a comment, without its delimiters and leading asterisks.
fn comment_lines(text: &str) -> Vec<String> {
    let text = text.strip_prefix("//").unwrap_or(text);
    let text = text.strip_prefix("/*").and_then(|text| text.strip_suffix("*/")).unwrap_or(text);
    let mut lines: Vec<String> = text
        .lines()
        .map(|line| {
            let line = line.trim_end().trim_end_matches('*').trim_end();
            let inner = line.trim_start().trim_start_matches('*');
            inner.strip_prefix(' ').unwrap_or(inner).trim_end().to_owned()
        })
        .collect();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines.drain(..lines.iter().position(|line| !line.is_empty()).unwrap_or(0));
    lines
}
