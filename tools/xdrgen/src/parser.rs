//! Parser for the grammar of RFC 4506 §6.3 and RFC 5531 §12.2, and for the extensions in the crate's documentation.
//!
//! It uses winnow, because `toml` depends on it anyway, and because winnow supports error types of its users.

use std::ops::Range;

use winnow::combinator::opt;
use winnow::error::ParserError;
use winnow::prelude::*;
use winnow::stream::{Stream, TokenSlice};
use winnow::token::any;

use crate::ast::{Arm, Base, Body, Declaration, Definition, Member, Procedure, Shape, TypeBody, Union, Value, Version};
use crate::errors::Problems;
use crate::lexer::{Token, TokenKind, parse_number};
use crate::schema::{Name, Type};

/// Limit of nested anonymous types.
const MAX_DEPTH: usize = 16;

/// Longest name, in bytes.
const MAX_NAME: usize = 255;

/// Words that cannot be names.
const KEYWORDS: [&str; 20] = [
    "bool", "case", "char", "const", "default", "double", "enum", "float", "hyper", "int", "long", "opaque", "short",
    "string", "struct", "switch", "typedef", "union", "unsigned", "void",
];

type Tokens<'t> = TokenSlice<'t, Token<'t>>;
type Parsed<T> = Result<T, Unexpected>;

/// Parses all definitions of a file.
///
/// After an error, it continues after the definition.
pub(crate) fn parse(tokens: &[Token<'_>], problems: &mut Problems) -> Vec<Definition> {
    let mut definitions = Vec::new();
    let mut input = TokenSlice::new(tokens);
    let mut namespaces: Vec<Range<usize>> = Vec::new();
    while let Some(first) = input.first() {
        let start = tokens.len() - input.len();
        let found = match first.text {
            "namespace" => {
                namespaces.push(first.at.clone());
                namespace(&mut input)
            }
            "}" if namespaces.pop().is_some() => end_of_namespace(&mut input),
            _ => definition(&mut input),
        };
        match found {
            Ok(found) => definitions.extend(found),
            Err(error) => {
                let at = tokens.len() - error.left;
                let found = tokens.get(at);
                let end = tokens[..at].last().map_or(0, |token| token.at.end);
                // A missing `;` is noticed on the next line, but reported at the end of the line before.
                let found_at = found.filter(|_| error.expected != "`;`");
                problems.add(&found_at.map_or(end..end, |token| token.at.clone()), error.message(found));
                input = TokenSlice::new(&tokens[recover(tokens, start, at)..]);
            }
        }
    }
    if let Some(at) = namespaces.first() {
        problems.add(at, "this namespace has no `}`");
    }
    definitions
}

/// The first token after the definition that starts at `start` and has an error at `at`.
fn recover(tokens: &[Token<'_>], start: usize, at: usize) -> usize {
    let mut depth = 0_usize;
    for (i, token) in tokens.iter().enumerate().skip(start) {
        match token.text {
            "{" => depth += 1,
            "}" => depth = depth.saturating_sub(1),
            ";" if depth == 0 && i >= at => return i + 1,
            // These words begin a definition, because no definition contains them.
            "const" | "typedef" | "program" if i > start && i >= at => return i,
            _ => {}
        }
    }
    tokens.len()
}

/// An error at a token.
#[derive(Debug)]
struct Unexpected {
    /// Number of tokens from there to the end.
    left: usize,
    expected: String,
    /// Whether `expected` is the whole message rather than the expected token.
    is_reason: bool,
}

impl Unexpected {
    fn message(self, found: Option<&Token<'_>>) -> String {
        let found = found.map_or("the end of the file".into(), |token| format!("`{}`", token.text));
        if self.is_reason { self.expected } else { format!("expected {}, found {found}", self.expected) }
    }
}

impl ParserError<Tokens<'_>> for Unexpected {
    type Inner = Self;

    fn from_input(input: &Tokens<'_>) -> Self {
        Self { left: input.len(), expected: "more".into(), is_reason: false }
    }

    fn into_inner(self) -> Result<Self, Self> {
        Ok(self)
    }
}

/// An error at the next token, where `what` was expected.
fn expected<T>(input: &Tokens<'_>, what: impl Into<String>) -> Parsed<T> {
    Err(Unexpected { left: input.len(), expected: what.into(), is_reason: false })
}

/// An error at the next token, with a whole message.
fn refuse<T>(input: &Tokens<'_>, reason: impl Into<String>) -> Parsed<T> {
    Err(Unexpected { left: input.len(), expected: reason.into(), is_reason: true })
}

/// The text of the next token.
fn next<'s>(input: &Tokens<'s>) -> &'s str {
    input.first().filter(|token| token.kind != TokenKind::Text).map_or("", |token| token.text)
}

/// Parses a keyword or sign.
fn word<'t>(text: &str) -> impl FnMut(&mut Tokens<'t>) -> Parsed<&'t Token<'t>> {
    move |input| if next(input) == text { any(input) } else { expected(input, format!("`{text}`")) }
}

/// Parses items up to a closing sign.
fn until<'t, T>(
    close: &'static str,
    mut item: impl FnMut(&mut Tokens<'t>) -> Parsed<T>,
) -> impl FnMut(&mut Tokens<'t>) -> Parsed<Vec<T>> {
    move |input| {
        let mut items = Vec::new();
        while opt(word(close)).parse_next(input)?.is_none() {
            items.push(item(input)?);
        }
        Ok(items)
    }
}

fn name(input: &mut Tokens<'_>) -> Parsed<Name> {
    match input.first() {
        Some(token) if token.text.len() > MAX_NAME => refuse(input, format!("name is longer than {MAX_NAME} bytes")),
        Some(token) if token.kind == TokenKind::Word && !KEYWORDS.contains(&token.text) => {
            any.map(to_name).parse_next(input)
        }
        _ => expected(input, "a name"),
    }
}

fn to_name(token: &Token<'_>) -> Name {
    Name::new(token.text, token.at.clone())
}

fn value(input: &mut Tokens<'_>) -> Parsed<Value> {
    let Some(token) = input.first().filter(|token| token.kind == TokenKind::Number) else {
        let ended = input.first().and_then(|token| token.value);
        let value = |name| if let Some(value) = ended { Value::Number(value, name) } else { Value::Named(name) };
        return name.map(value).parse_next(input).or_else(|_| expected(input, "a number or constant"));
    };
    match parse_number(token.text) {
        Ok(number) => any.map(|token| Value::Number(number, to_name(token))).parse_next(input),
        Err(_) => refuse(input, format!("`{}` is not an integer of 64 bits", token.text)),
    }
}

/// The comments before tokens, or else the comments after the last token or its separator.
fn doc(tokens: &[Token<'_>]) -> Vec<String> {
    let after = || tokens.iter().rev().take(2).rev().flat_map(|token| token.after.clone()).collect();
    tokens.first().filter(|first| !first.before.is_empty()).map_or_else(after, |first| first.before.clone())
}

/// The tokens that were read since `start`.
fn read<'t>(start: &Tokens<'t>, input: &Tokens<'t>) -> &'t [Token<'t>] {
    start.clone().next_slice(start.len() - input.len())
}

/// Parses a definition. `struct *NAME { … }` defines two types, and the structure comes first.
fn definition(input: &mut Tokens<'_>) -> Parsed<Vec<Definition>> {
    let start = input.clone();
    let mut found = match next(input) {
        "const" => vec![constant(input)?],
        "typedef" => {
            let (_, declaration, _) = (any, declaration(0), word(";")).parse_next(input)?;
            vec![Definition { name: declaration.name.clone(), body: Body::Typedef(declaration) }]
        }
        "enum" | "struct" | "union" => named_type(input)?,
        "program" => vec![program(input)?],
        "pragma" => return pragma(input),
        _ => return expected(input, "a definition"),
    };
    let tokens = read(&start, input);
    // The comment of a type or program may follow its first brace.
    let brace = tokens.iter().position(|token| token.text == "{").filter(|_| next(&start) != "typedef");
    let Some(first) = found.first_mut() else { return Ok(found) };
    first.name.doc = doc(&tokens[..brace.map_or(tokens.len(), |brace| brace + 1)]);
    Ok(found)
}

/// Parses the start of `namespace NAME { … }` of xdrpp. Its definitions belong to the file.
fn namespace(input: &mut Tokens<'_>) -> Parsed<Vec<Definition>> {
    (any, name, word("{")).map(|_| Vec::new()).parse_next(input)
}

fn end_of_namespace(input: &mut Tokens<'_>) -> Parsed<Vec<Definition>> {
    (any, opt(word(";"))).map(|_| Vec::new()).parse_next(input)
}

/// Parses `pragma …;` of the Linux kernel's compiler, which does not affect the encoding.
fn pragma(input: &mut Tokens<'_>) -> Parsed<Vec<Definition>> {
    any(input)?;
    while next(input) != ";" {
        name(input)?;
    }
    any.map(|_| Vec::new()).parse_next(input)
}

fn constant(input: &mut Tokens<'_>) -> Parsed<Definition> {
    let (_, name, _) = (any, name, word("=")).parse_next(input)?;
    let is_text = input.first().is_some_and(|token| token.kind == TokenKind::Text);
    let value = if is_text { any.value(None).parse_next(input)? } else { Some(value(input)?) };
    word(";").parse_next(input)?;
    Ok(Definition { name, body: Body::Constant(value) })
}

fn named_type(input: &mut Tokens<'_>) -> Parsed<Vec<Definition>> {
    let keyword = any(input)?.text;
    let (pointer, mut name) = (opt(word("*")), name).parse_next(input)?;
    // This is a forward declaration.
    if pointer.is_none() && keyword != "enum" && opt(word(";")).parse_next(input)?.is_some() {
        return Ok(Vec::new());
    }
    let body = type_body(keyword, 0, input)?;
    (opt(self::name), word(";")).parse_next(input)?;
    if pointer.is_none() {
        return Ok(vec![Definition { name, body: Body::Type(body) }]);
    }
    let alias = name.clone();
    name.text.push_str("_entry");
    let base = Base::Named(name.clone());
    let pointer = Declaration { name: alias.clone(), base, shape: Shape::Pointer };
    let entry = Definition { name, body: Body::Type(body) };
    Ok(vec![entry, Definition { name: alias, body: Body::Typedef(pointer) }])
}

/// Parses the part of a type after `enum`, `struct` or `union` and the name.
fn type_body(keyword: &str, depth: usize, input: &mut Tokens<'_>) -> Parsed<TypeBody> {
    if depth > MAX_DEPTH {
        return refuse(input, format!("types are nested more than {MAX_DEPTH} deep"));
    }
    match keyword {
        "enum" => (word("{"), members).map(|(_, members)| TypeBody::Enum(members)).parse_next(input),
        "struct" => {
            let (_, fields) = (word("{"), until("}", field(depth))).parse_next(input)?;
            Ok(TypeBody::Struct(fields.into_iter().flatten().collect()))
        }
        _ => {
            let (_, _, switch) = (word("switch"), word("("), declaration(depth)).parse_next(input)?;
            let (_, _, arms) = (word(")"), word("{"), until("}", arm(depth))).parse_next(input)?;
            Ok(TypeBody::Union(Union { switch: Box::new(switch), arms }))
        }
    }
}

fn members(input: &mut Tokens<'_>) -> Parsed<Vec<Member>> {
    let mut members = Vec::new();
    loop {
        let start = input.clone();
        let mut name = name(input)?;
        let value = if opt(word("=")).parse_next(input)?.is_some() { Some(value(input)?) } else { None };
        let more = opt(word(",")).parse_next(input)?.is_some();
        name.doc = doc(read(&start, input));
        members.push(Member { name, value });
        if opt(word("}")).parse_next(input)?.is_some() {
            return Ok(members);
        }
        if !more {
            return expected(input, "`,` or `}`");
        }
    }
}

/// Parses a field or arm with its `;`. `None` for `void`.
fn field<'t>(depth: usize) -> impl FnMut(&mut Tokens<'t>) -> Parsed<Option<Declaration>> {
    move |input| {
        if next(input) == "void" {
            return (any, word(";")).value(None).parse_next(input);
        }
        let start = input.clone();
        let (mut field, _) = (declaration(depth), word(";")).parse_next(input)?;
        field.name.doc = doc(read(&start, input));
        Ok(Some(field))
    }
}

fn arm<'t>(depth: usize) -> impl FnMut(&mut Tokens<'t>) -> Parsed<Arm> {
    move |input| {
        let mut cases = Vec::new();
        loop {
            match next(input) {
                "case" => cases.push((any, value, word(":")).map(|(_, value, _)| Some(value)).parse_next(input)?),
                "default" => cases.push((any, word(":")).value(None).parse_next(input)?),
                _ if cases.is_empty() => return expected(input, "`case`, `default` or `}`"),
                _ => return Ok(Arm { cases, field: field(depth)(input)? }),
            }
        }
    }
}

fn declaration<'t>(depth: usize) -> impl FnMut(&mut Tokens<'t>) -> Parsed<Declaration> {
    move |input| {
        let base = base(depth, input)?;
        let is_pointer = !base.is_bytes() && opt(word("*")).parse_next(input)?.is_some();
        let name = name(input)?;
        let shape = shape(&base, is_pointer, input)?;
        if matches!((&base, &shape), (Base::Opaque, Shape::Single)) {
            return expected(input, "`[` or `<`");
        }
        let shape = shape.of_bytes(&base);
        Ok(Declaration { name, base, shape })
    }
}

/// Parses the part of a declaration after its name.
fn shape(base: &Base, is_pointer: bool, input: &mut Tokens<'_>) -> Parsed<Shape> {
    match (next(input), base) {
        _ if is_pointer => Ok(Shape::Pointer),
        ("[", Base::Text) => expected(input, "`<`"),
        ("[", _) => (any, value, word("]")).map(|(_, value, _)| Shape::Fixed(value)).parse_next(input),
        ("<", _) => bound(input),
        _ => Ok(Shape::Single),
    }
}

impl Base {
    fn is_bytes(&self) -> bool {
        matches!(self, Self::Opaque | Self::ZeroCopyOpaque | Self::Text)
    }
}

impl Shape {
    /// Gives a single `opaque` or `string` value any length.
    fn of_bytes(self, base: &Base) -> Self {
        match self {
            Self::Single if base.is_bytes() => Self::Variable(None),
            shape => shape,
        }
    }
}

/// Parses `<` and `>` and the number between.
fn bound(input: &mut Tokens<'_>) -> Parsed<Shape> {
    word("<").parse_next(input)?;
    let max = if next(input) == ">" { None } else { Some(value(input)?) };
    word(">").parse_next(input)?;
    Ok(Shape::Variable(max))
}

/// Parses the type before a name.
fn base(depth: usize, input: &mut Tokens<'_>) -> Parsed<Base> {
    let keyword = next(input);
    let ty = match keyword {
        "int" | "long" | "short" | "char" => Type::Int,
        "hyper" => Type::Hyper,
        "float" => Type::Float,
        "double" => Type::Double,
        "bool" => Type::Bool,
        "unsigned" => {
            any(input)?;
            return Ok(Base::Builtin(match next(input) {
                "int" | "long" | "short" | "char" => any.value(Type::UnsignedInt).parse_next(input)?,
                "hyper" => any.value(Type::UnsignedHyper).parse_next(input)?,
                _ => Type::UnsignedInt,
            }));
        }
        "opaque" => return any.value(Base::Opaque).parse_next(input),
        "zcopaque" => return any.value(Base::ZeroCopyOpaque).parse_next(input),
        "string" => return any.value(Base::Text).parse_next(input),
        "quadruple" => return refuse(input, "`quadruple` is not supported: Rust has no such type"),
        "void" => return refuse(input, "a named item cannot be `void`"),
        "enum" | "struct" | "union" => {
            any(input)?;
            return if matches!(next(input), "{" | "switch") {
                type_body(keyword, depth + 1, input).map(Base::Inline)
            } else {
                name.map(Base::Named).parse_next(input)
            };
        }
        _ => return name.map(Base::Named).parse_next(input).or_else(|_| expected(input, "a type")),
    };
    any.value(Base::Builtin(ty)).parse_next(input)
}

fn program(input: &mut Tokens<'_>) -> Parsed<Definition> {
    let (_, name, _) = (any, name, word("{")).parse_next(input)?;
    let versions = until("}", version).parse_next(input)?;
    let (_, number, _) = (word("="), value, word(";")).parse_next(input)?;
    Ok(Definition { name, body: Body::Program(number, versions) })
}

fn version(input: &mut Tokens<'_>) -> Parsed<Version> {
    let start = input.clone();
    let (_, mut name, _) = (word("version"), name, word("{")).parse_next(input)?;
    name.doc = doc(read(&start, input));
    let procedures = until("}", procedure).parse_next(input)?;
    let (_, number, _) = (word("="), value, word(";")).parse_next(input)?;
    Ok(Version { name, number, procedures })
}

fn procedure(input: &mut Tokens<'_>) -> Parsed<Procedure> {
    let start = input.clone();
    let (results, mut name, _) = (parameter, name, word("(")).parse_next(input)?;
    let first = if next(input) == ")" { None } else { argument(input)? };
    let mut arguments = Vec::from_iter(first);
    while !arguments.is_empty() && opt(word(",")).parse_next(input)?.is_some() {
        match argument(input)? {
            Some(argument) => arguments.push(argument),
            None => return refuse(input, "`void` cannot follow another argument"),
        }
    }
    let (_, _, number, _) = (word(")"), word("="), value, word(";")).parse_next(input)?;
    name.doc = doc(read(&start, input));
    Ok(Procedure { name, number, arguments, results })
}

/// Parses an argument, with or without a name. `None` for `void`.
fn argument(input: &mut Tokens<'_>) -> Parsed<Option<Declaration>> {
    let Some(mut argument) = parameter(input)? else { return Ok(None) };
    let is_named = input.first().is_some_and(|token| token.kind == TokenKind::Word);
    if is_named {
        let is_pointer = matches!(argument.shape, Shape::Pointer);
        // `opaque<4> x` and `int<> x` have their bound before the name.
        let has_bound = match argument.shape {
            Shape::Variable(Some(_)) => true,
            Shape::Variable(None) => !argument.base.is_bytes(),
            _ => false,
        };
        name(input)?;
        if !has_bound {
            argument.shape = shape(&argument.base, is_pointer, input)?.of_bytes(&argument.base);
        }
    }
    Ok(Some(argument))
}

/// Parses an argument or result without its name. `None` for `void`.
fn parameter(input: &mut Tokens<'_>) -> Parsed<Option<Declaration>> {
    if next(input) == "void" {
        return any.value(None).parse_next(input);
    }
    let at = input.first().map_or(0..0, |token| token.at.clone());
    let base = base(0, input)?;
    if matches!(base, Base::Inline(_)) {
        return refuse(input, "arguments and results need a type with a name");
    }
    let shape = match (next(input), &base) {
        ("<", _) => bound(input)?,
        ("*", _) => any.value(Shape::Pointer).parse_next(input)?,
        _ => Shape::Single.of_bytes(&base),
    };
    Ok(Some(Declaration { name: Name::new("", at), base, shape }))
}
