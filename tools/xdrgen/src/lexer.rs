//! Words, numbers and signs of a file, with the comments that document them.

use std::ops::Range;

use winnow::ascii::till_line_ending;
use winnow::combinator::{alt, delimited, opt};
use winnow::prelude::*;
use winnow::stream::{LocatingSlice, Location, Stream};
use winnow::token::{one_of, take_till, take_until, take_while};

use crate::errors::Problems;
use crate::preprocessor::Preprocessor;

/// Kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Word,
    Number,
    Text,
    Sign,
    Comment,
}

/// A word, number, text or sign.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token<'s> {
    pub(crate) kind: Kind,
    pub(crate) text: &'s str,
    pub(crate) at: Range<usize>,
    /// Lines of the comments right in front.
    pub(crate) before: Vec<String>,
    /// Lines of the comments behind it on its line.
    pub(crate) after: Vec<String>,
}

/// Splits a file into tokens.
pub(crate) fn lex<'s>(text: &'s str, problems: &mut Problems) -> (Vec<Token<'s>>, Preprocessor<'s>) {
    let mut tokens: Vec<Token<'s>> = Vec::new();
    let mut preprocessor = Preprocessor::default();
    let mut input = LocatingSlice::new(text);
    let mut comments: Vec<String> = Vec::new();
    let mut starts_line = true;
    loop {
        let space = space(&mut input);
        starts_line |= space.contains('\n');
        if space.matches('\n').nth(1).is_some() {
            comments.clear();
        }
        if input.is_empty() {
            break;
        }
        if starts_line && (preprocessor.is_skipping() || input.starts_with(['#', '%'])) {
            let (line, at) = line(&mut input);
            if line.starts_with(['#', '%']) {
                preprocessor.line(line, at, problems);
            }
            comments.clear();
            continue;
        }
        let start = input.current_token_start();
        let Ok((kind, at)) = token.with_span().parse_next(&mut input) else {
            let len = bad_token(text, start, problems);
            input.next_slice(len);
            continue;
        };
        let text = &text[at.clone()];
        match (kind, tokens.last_mut()) {
            (Kind::Comment, Some(last)) if !starts_line => last.after.extend(comment_lines(text)),
            (Kind::Comment, _) => comments.extend(comment_lines(text)),
            _ => {
                let before = std::mem::take(&mut comments);
                tokens.push(Token { kind, text, at, before, after: Vec::new() });
                starts_line = false;
            }
        }
    }
    preprocessor.end(problems);
    (tokens, preprocessor)
}

/// The value of a number: decimal, `0x…` or `0…`, with an optional sign.
pub(crate) fn number(text: &str) -> Option<i128> {
    let (sign, digits) = text.strip_prefix('-').map_or(("", text), |digits| ("-", digits));
    let (radix, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    if digits.starts_with(['+', '-']) {
        return None;
    }
    i128::from_str_radix(&format!("{sign}{digits}"), radix).ok().and_then(in_range)
}

/// `value`, if it is a `hyper` or `unsigned hyper`.
pub(crate) fn in_range(value: i128) -> Option<i128> {
    Some(value).filter(|value| (i64::MIN.into()..=u64::MAX.into()).contains(value))
}

/// Reports what no token starts with. Returns its bytes.
fn bad_token(text: &str, start: usize, problems: &mut Problems) -> usize {
    let rest = &text[start..];
    let char_len = rest.chars().next().map_or(0, char::len_utf8);
    let (message, marked, len) = if rest.starts_with("/*") {
        ("comment has no end".into(), 2, rest.len())
    } else if rest.starts_with('"') {
        ("text has no end on its line".into(), 1, rest.find('\n').unwrap_or(rest.len()))
    } else {
        (format!("unexpected character `{}`", rest[..char_len].escape_debug()), char_len, char_len)
    };
    problems.add(&(start..start + marked), message);
    len
}

pub(crate) fn is_word_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn space<'s>(input: &mut LocatingSlice<&'s str>) -> &'s str {
    let len = input.len() - input.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}').len();
    input.next_slice(len)
}

/// A line, with those that it continues on.
fn line<'s>(input: &mut LocatingSlice<&'s str>) -> (&'s str, Range<usize>) {
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

fn token(input: &mut LocatingSlice<&str>) -> winnow::Result<Kind> {
    alt((
        (one_of(('a'..='z', 'A'..='Z', '_')), take_while(0.., is_word_char)).value(Kind::Word),
        (opt('-'), one_of('0'..='9'), take_while(0.., is_word_char)).value(Kind::Number),
        delimited('"', take_till(0.., ['"', '\n']), '"').value(Kind::Text),
        ("/*", take_until(0.., "*/"), "*/").value(Kind::Comment),
        ("//", till_line_ending).value(Kind::Comment),
        one_of(['{', '}', '(', ')', '[', ']', '<', '>', ';', ':', ',', '=', '*']).value(Kind::Sign),
    ))
    .parse_next(input)
}

/// The lines of a comment without its frame.
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
