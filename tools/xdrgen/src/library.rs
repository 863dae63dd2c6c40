//! Types of the RPC library that a file uses without defining them.

use crate::Source;
use crate::ast::Definition;
use crate::errors::Problems;
use crate::lexer::{Token, TokenKind, lex};
use crate::parser::parse;
use crate::sources::Sources;

/// Names and definitions of the types.
const TYPES: [(&str, &str); 4] = [
    (
        "authsys_parms",
        "/* Body of an AUTH_SYS credential (RFC 5531, appendix A). */ struct authsys_parms { unsigned int stamp;
        string machinename<255>; unsigned int uid; unsigned int gid; unsigned int gids<16>; };",
    ),
    (
        "opaque_auth",
        "/* A credential or verifier (RFC 5531 §8.2). */ struct opaque_auth { int flavor; opaque body<400>; };",
    ),
    (
        "netbuf",
        "/* A transport address, in Sun's RPC library. */ struct netbuf { unsigned int maxlen; opaque buf<>; };",
    ),
    ("netobj", "/* Data of the application, in Sun's RPC library. */ typedef opaque netobj<1024>;"),
];

/// Adds types that `tokens` use, before the definitions of the file.
pub(crate) fn add_used(tokens: &[Token<'_>], definitions: &mut Vec<Definition>, problems: &mut Problems) {
    for (name, text) in TYPES {
        let is_defined = definitions.iter().any(|definition| definition.name.text == name);
        let used = tokens.iter().find(|token| token.kind == TokenKind::Word && token.text == name);
        if let Some(used) = used.filter(|_| !is_defined) {
            let sources = Sources::text(&Source { text: text.into(), ..Source::default() });
            let (mut tokens, _) = lex(&sources, &[], problems);
            // Errors refer to the position where the file uses the type.
            tokens.iter_mut().for_each(|token| token.at = used.at.clone());
            definitions.splice(0..0, parse(&tokens, problems));
        }
    }
}
