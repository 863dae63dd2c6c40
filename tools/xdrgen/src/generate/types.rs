//! Generation of types with their codec.

use std::collections::HashMap;

use proc_macro2::{Ident, Literal, TokenStream};
use quote::quote;

use super::codec::{FieldRun, Value};
use super::docs;
use super::model::{Facts, Model};
use super::names::Scope;
use crate::schema::{Constant, Field, Form, Schema, Type, TypeDef, TypeId};

/// Generates the constants.
pub(super) fn constants(schema: &Schema, model: &Model) -> Vec<TokenStream> {
    // A tuple struct is also a function, so constants must not have its name.
    let mut scope = Scope::default();
    let structs = (0..model.types.len()).filter_map(|index| model.newtype(&Type::Named(TypeId(index))));
    structs.for_each(|(name, _)| _ = scope.declare(name.to_string()));
    let constant = |constant: &Constant| {
        let (name, doc) = (scope.shouty(&constant.name.text), docs(&constant.name, &constant.name.text));
        let value = Literal::i128_unsuffixed(constant.value);
        let ty = match constant.value {
            0..=0xFFFF_FFFF => quote!(u32),
            -0x8000_0000..0 => quote!(i32),
            0x8000_0000_0000_0000.. => quote!(u64),
            _ => quote!(i64),
        };
        quote!(#doc pub const #name: #ty = #value;)
    };
    schema.constants.iter().map(constant).collect()
}

/// Code of an implementation of `Decode` and `Encode`.
pub(super) struct Codec {
    pub(super) decode: TokenStream,
    pub(super) len: TokenStream,
    pub(super) encode: TokenStream,
    /// Number of fields or arms.
    pub(super) parts: usize,
}

impl Model {
    /// Generates all types.
    pub(super) fn types(&self) -> impl Iterator<Item = TokenStream> {
        (0..self.types.len()).map(|index| self.item(TypeId(index)))
    }

    fn item(&self, id: TypeId) -> TokenStream {
        let TypeDef { name, form } = &self.types[id.0];
        let (doc, facts) = (docs(name, &name.text), self.facts(&Type::Named(id)));
        let life = if facts.borrows { quote!(<'a>) } else { quote!() };
        let rust = &self.names[id.0];
        match form {
            Form::Enum(values) => self.enum_item(id, &doc, values),
            Form::Struct { fields, .. } => {
                let idents = self.idents(fields);
                let comments = fields.iter().map(|field| docs(&field.name, &field.name.text));
                let types = fields.iter().map(|field| self.rust_type(&field.ty, &quote!('a), &quote!()));
                let derives = derives(facts);
                let codec = self.struct_codec(&name.text, fields, &idents);
                let codec = self.codec(id, facts, codec);
                quote! {
                    #doc
                    #derives
                    pub struct #rust #life {
                        #(#comments pub #idents: #types,)*
                    }
                    #codec
                }
            }
            Form::Union(union) => self.union(id, &doc, union),
            Form::Alias(ty) if self.newtype(&Type::Named(id)).is_some() => {
                let (derives, inner) = (derives(facts), self.rust_type(ty, &quote!('a), &quote!()));
                let (decode, value) = (self.decode(ty, &name.text), Value::place(quote!(self.0)));
                let (len, encode) = (self.len(ty, &value), self.encode(ty, &value));
                let codec = Codec { decode: quote!(Ok(Self(#decode))), len, encode, parts: 1 };
                let codec = self.codec(id, facts, codec);
                quote!(#doc #derives pub struct #rust #life(pub #inner); #codec)
            }
            Form::Alias(ty) => {
                let ty = self.rust_type(ty, &quote!('a), &quote!());
                quote!(#doc pub type #rust #life = #ty;)
            }
        }
    }

    fn struct_codec(&self, name: &str, fields: &[Field], idents: &[Ident]) -> Codec {
        let what = |field: &Field| format!("{name}.{}", field.name.text);
        let value = |ident| Value::place(quote!(self.#ident));
        // Fields may have the names of variables in the generated code.
        let mut scope = Scope::with(&["decoder", "words"]);
        let locals: Vec<_> = fields.iter().map(|field| scope.snake(&field.name.text)).collect();
        let inits = idents.iter().zip(&locals);
        let inits = inits.map(|(ident, local)| if ident == local { quote!(#ident) } else { quote!(#ident: #local) });
        let mut decode = Vec::new();
        for FieldRun { at, fields, words } in self.field_runs(fields, |facts| facts.reads_words) {
            let locals = &locals[at..][..fields.len()];
            if locals.len() == 1 {
                let (value, local) = (self.decode(&fields[0].ty, &what(&fields[0])), &locals[0]);
                decode.push(quote!(let #local = #value;));
            } else {
                let (mut next, what, words) = (0, what(&fields[0]), Literal::usize_unsuffixed(words));
                let values = fields.iter().map(|field| self.decode_words(&field.ty, &mut next));
                decode.push(quote!(let words = decoder.word_array::<#words>(#what)?; #(let #locals = #values;)*));
            }
        }
        let decode = quote!(#(#decode)* Ok(Self { #(#inits),* }));
        let fixed = fields.iter().filter_map(|field| self.facts(&field.ty).len).fold(0, usize::saturating_add);
        let mut lens: Vec<_> = (fields.iter().zip(idents))
            .filter(|(field, _)| self.facts(&field.ty).len.is_none())
            .map(|(field, ident)| self.len(&field.ty, &value(ident)))
            .collect();
        if fixed > 0 || lens.is_empty() {
            let fixed = Literal::usize_unsuffixed(fixed);
            lens.insert(0, quote!(#fixed));
        }
        // The encoding of the last field is the tail expression; all others get a `?`.
        let (mut encode, mut tail) = (Vec::new(), quote!(Ok(())));
        for FieldRun { at, fields: run, words } in self.field_runs(fields, |facts| facts.writes_words) {
            if let [field] = run {
                tail = self.encode(&field.ty, &value(&idents[at]));
                if at + 1 < fields.len() {
                    encode.push(quote!(#tail?;));
                    tail = quote!(Ok(()));
                }
            } else {
                let (mut values, count) = (Vec::new(), Literal::usize_unsuffixed(words));
                for (field, ident) in run.iter().zip(&idents[at..]) {
                    self.to_words(&field.ty, &quote!(self.#ident), &mut values);
                }
                encode.push(quote!(encoder.words::<#count>([#(#values),*])?;));
            }
        }
        let encode = quote!(#(#encode)* #tail);
        Codec { decode, len: quote!(#(#lens)+*), encode, parts: fields.len() }
    }

    fn enum_item(&self, id: TypeId, doc: &TokenStream, values: &[Constant]) -> TokenStream {
        let rust = &self.names[id.0];
        let idents = self.variants(values);
        let (mut variants, mut numbers, mut names, mut texts, mut aliases) = (vec![], vec![], vec![], vec![], vec![]);
        let (mut firsts, mut scope) = (HashMap::new(), Scope::default());
        idents.iter().for_each(|name| _ = scope.declare(name.to_string()));
        for (value, name) in values.iter().zip(&idents) {
            let (number, doc) = (Literal::i128_unsuffixed(value.value), docs(&value.name, &value.name.text));
            let first = *firsts.entry(value.value).or_insert(name);
            // A repeated number cannot be a variant, so it becomes a constant.
            if first != name {
                let name = scope.shouty(&name.to_string());
                aliases.push(quote!(#doc pub const #name: Self = Self::#first;));
                continue;
            }
            let default = (value.value == 0).then(|| quote!(#[default]));
            variants.push(quote!(#doc #default #name = #number));
            numbers.push(number);
            names.push(name);
            texts.push(&value.name.text);
        }
        let what = &self.types[id.0].name.text;
        let default = values.iter().any(|value| value.value == 0).then(|| quote!(Default,));
        let codec = Codec {
            decode: quote! {
                match decoder.u32(#what)?.cast_signed() {
                    #(#numbers => Ok(Self::#names),)*
                    _ => Err(decoder.unknown(#what)),
                }
            },
            len: quote!(4),
            encode: quote!(encoder.u32((*self as i32).cast_unsigned())),
            parts: 1,
        };
        let codec = self.codec(id, self.facts(&Type::Named(id)), codec);
        quote! {
            #doc
            #[repr(i32)]
            #[derive(Clone, Copy, Debug, #default PartialEq, Eq, PartialOrd, Ord, Hash)]
            pub enum #rust {
                #(#variants,)*
            }
            impl #rust {
                #(#aliases)*

                /// Name in the specification.
                #[must_use]
                pub const fn name(self) -> &'static str {
                    match self {
                        #(Self::#names => #texts,)*
                    }
                }
            }
            #codec
        }
    }

    /// Generates the implementations of `Decode` and `Encode`.
    pub(super) fn codec(&self, id: TypeId, facts: Facts, codec: Codec) -> TokenStream {
        let (xdr, rust) = (&self.xdr, &self.names[id.0]);
        let Codec { decode, len, encode, parts } = codec;
        let inline = (parts <= 8 || facts.len.is_some_and(|len| len <= 96)).then(|| quote!(#[inline]));
        let (generics, life, elided) = match facts.borrows {
            true => (quote!(<'a>), quote!(<'a>), quote!(<'_>)),
            false => (quote!(), quote!(<'_>), quote!()),
        };
        let (no_decoder, no_encoder) = match parts {
            0 => (quote!(let _ = decoder;), quote!(let _ = encoder;)),
            _ => (quote!(), quote!()),
        };
        quote! {
            impl #generics #xdr::Decode #life for #rust #generics {
                #inline
                fn decode(decoder: &mut #xdr::Decoder #life) -> Result<Self, #xdr::BadXdr> {
                    #no_decoder
                    #decode
                }
            }

            impl #xdr::Encode for #rust #elided {
                #[inline]
                fn encoded_len(&self) -> usize {
                    #len
                }

                #inline
                fn encode(&self, encoder: &mut #xdr::Encoder<'_>) -> Result<(), #xdr::EncodeError> {
                    #no_encoder
                    #encode
                }
            }
        }
    }
}

pub(super) fn derives(facts: Facts) -> TokenStream {
    let default = facts.has_default.then(|| quote!(Default,));
    let eq = facts.is_eq.then(|| quote!(, Eq));
    quote!(#[derive(Clone, Copy, Debug, #default PartialEq #eq)])
}
