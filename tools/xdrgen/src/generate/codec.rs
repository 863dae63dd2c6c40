//! Code that decodes and encodes values.

use proc_macro2::{Literal, TokenStream};
use quote::quote;

use super::model::{Facts, Model, encodes_itself};
use crate::schema::{Field, Form, Type};

/// Maximum words that are decoded or encoded together.
const MAX_RUN: usize = 32;

/// A value to encode: an expression for its place, or for a reference to it.
#[derive(Clone)]
pub(super) struct Value {
    name: TokenStream,
    is_reference: bool,
}

impl Value {
    pub(super) fn place(name: TokenStream) -> Self {
        Self { name, is_reference: false }
    }

    pub(super) fn reference(name: TokenStream) -> Self {
        Self { name, is_reference: true }
    }

    fn as_reference(&self) -> TokenStream {
        let name = &self.name;
        if self.is_reference { name.clone() } else { quote!(&#name) }
    }

    fn as_copy(&self) -> TokenStream {
        let name = &self.name;
        if self.is_reference { quote!(*#name) } else { name.clone() }
    }
}

impl Model {
    /// An expression that decodes a value from `decoder`, or returns an error.
    pub(super) fn decode(&self, ty: &Type, what: &str) -> TokenStream {
        let (xdr, ty) = (&self.xdr, self.resolve(ty));
        if let Some((name, inner)) = self.newtype(ty) {
            // Errors name the field instead of the typedef.
            let inner = self.decode(inner, what);
            return quote!(#name(#inner));
        }
        match ty {
            Type::Int => quote!(decoder.u32(#what)?.cast_signed()),
            Type::UnsignedInt => quote!(decoder.u32(#what)?),
            Type::Hyper => quote!(decoder.u64(#what)?.cast_signed()),
            Type::UnsignedHyper => quote!(decoder.u64(#what)?),
            Type::Float => quote!(f32::from_bits(decoder.u32(#what)?)),
            Type::Double => quote!(f64::from_bits(decoder.u64(#what)?)),
            Type::Bool => quote!(decoder.bool(#what)?),
            Type::FixedOpaque(_) => quote!(decoder.fixed(#what)?),
            Type::Opaque { max, is_bulk } | Type::Text { max, is_bulk } => {
                let max = bound(*max);
                if *is_bulk { quote!(decoder.bulk(#max, #what)?) } else { quote!(decoder.opaque(#max, #what)?) }
            }
            Type::Array(_, max) => {
                let max = bound(*max);
                quote!(#xdr::Array::decode(decoder, #max, #what)?)
            }
            Type::Optional(inner) => {
                let inner = self.decode(inner, what);
                quote!(if decoder.bool(#what)? { Some(#inner) } else { None })
            }
            Type::Void | Type::FixedArray(..) | Type::List(_) | Type::Named(_) | Type::Recursive(_) => {
                quote!(#xdr::Decode::decode(decoder)?)
            }
        }
    }

    /// An expression of type `Result` that encodes a value to `encoder`.
    pub(super) fn encode(&self, ty: &Type, value: &Value) -> TokenStream {
        let (xdr, name, reference, copy) = (&self.xdr, &value.name, value.as_reference(), value.as_copy());
        let ty = self.resolve(ty);
        if let Some((_, inner)) = self.newtype(ty) {
            return self.encode(inner, &Value::place(quote!(#name.0)));
        }
        match ty {
            Type::Int => quote!(encoder.u32(#name.cast_unsigned())),
            Type::UnsignedInt => quote!(encoder.u32(#copy)),
            Type::Hyper => quote!(encoder.u64(#name.cast_unsigned())),
            Type::UnsignedHyper => quote!(encoder.u64(#copy)),
            Type::Float => quote!(encoder.u32(#name.to_bits())),
            Type::Double => quote!(encoder.u64(#name.to_bits())),
            Type::Bool => quote!(encoder.bool(#copy)),
            Type::FixedOpaque(_) => quote!(encoder.fixed(#reference)),
            Type::Opaque { max, is_bulk } | Type::Text { max, is_bulk } => {
                let max = bound(*max);
                if *is_bulk { quote!(encoder.bulk(#reference, #max)) } else { quote!(encoder.opaque(#name, #max)) }
            }
            Type::Array(_, max) => {
                let max = bound(*max);
                quote!(#name.encode(encoder, #max))
            }
            Type::Optional(inner) if !encodes_itself(inner) => {
                let some = self.encode(inner, &Value::reference(quote!(some)));
                quote! {
                    match #reference {
                        Some(some) => {
                            encoder.bool(true)?;
                            #some
                        }
                        None => encoder.bool(false),
                    }
                }
            }
            _ => quote!(#xdr::Encode::encode(#reference, encoder)),
        }
    }

    /// An expression for the encoded length of a value.
    pub(super) fn len(&self, ty: &Type, value: &Value) -> TokenStream {
        let (xdr, name, reference) = (&self.xdr, &value.name, value.as_reference());
        if let Some(len) = self.facts(ty).len {
            let len = Literal::usize_unsuffixed(len);
            return quote!(#len);
        }
        let ty = self.resolve(ty);
        if let Some((_, inner)) = self.newtype(ty) {
            return self.len(inner, &Value::place(quote!(#name.0)));
        }
        match ty {
            Type::Opaque { is_bulk, .. } | Type::Text { is_bulk, .. } if !is_bulk => {
                quote!(4 + #xdr::padded(#name.len()))
            }
            Type::Opaque { .. } | Type::Text { .. } | Type::Array(..) => quote!(#name.encoded_len()),
            Type::Optional(inner) if !encodes_itself(inner) => {
                let some = self.len(inner, &Value::reference(quote!(some)));
                match self.facts(inner).len {
                    Some(_) => quote!(4 + #name.map_or(0, |_| #some)),
                    None => quote!(4 + #name.as_ref().map_or(0, |some| #some)),
                }
            }
            _ => quote!(#xdr::Encode::encoded_len(#reference)),
        }
    }
}

/// Consecutive fields that are decoded or encoded together, or one field.
pub(super) struct FieldRun<'s> {
    /// Index of the first field.
    pub(super) at: usize,
    pub(super) fields: &'s [Field],
    /// Number of words; 0 for a single field of another type.
    pub(super) words: usize,
}

impl Model {
    /// Divides fields into runs of words, for which `is_words` holds, and other fields.
    pub(super) fn field_runs<'s>(&self, fields: &'s [Field], is_words: impl Fn(Facts) -> bool) -> Vec<FieldRun<'s>> {
        let mut runs: Vec<FieldRun<'s>> = Vec::new();
        for (at, field) in fields.iter().enumerate() {
            let facts = self.facts(&field.ty);
            let words = if is_words(facts) { facts.len.unwrap_or(0) / 4 } else { 0 };
            match runs.last_mut() {
                Some(run) if words > 0 && run.words > 0 && run.words + words <= MAX_RUN => {
                    run.words += words;
                    run.fields = &fields[run.at..=at];
                }
                _ => {
                    runs.push(FieldRun { at, fields: &fields[at..=at], words: if words > MAX_RUN { 0 } else { words } })
                }
            }
        }
        runs
    }

    /// Adds expressions for the words of `place` to `words`, each a `u32`.
    pub(super) fn to_words(&self, ty: &Type, place: &TokenStream, words: &mut Vec<TokenStream>) {
        let mut long = |number: TokenStream| words.extend([quote!(((#number >> 32) as u32)), quote!((#number as u32))]);
        match self.resolve(ty) {
            Type::Int => words.push(quote!(#place.cast_unsigned())),
            Type::Hyper | Type::UnsignedHyper => long(place.clone()),
            Type::Float => words.push(quote!(#place.to_bits())),
            Type::Double => long(quote!(#place.to_bits())),
            Type::Bool => words.push(quote!(u32::from(#place))),
            Type::Named(id) => match &self.types[id.0].form {
                Form::Struct { fields, .. } => {
                    for (field, ident) in fields.iter().zip(self.idents(fields)) {
                        self.to_words(&field.ty, &quote!(#place.#ident), words);
                    }
                }
                _ => words.push(quote!((#place as u32))),
            },
            _ => words.push(place.clone()),
        }
    }

    /// An expression for a value that is decoded from `words`, beginning with word number `next`.
    pub(super) fn decode_words(&self, ty: &Type, next: &mut usize) -> TokenStream {
        let mut word = || {
            let index = Literal::usize_unsuffixed(*next);
            *next += 1;
            quote!(words[#index])
        };
        let long = |high: TokenStream, low: TokenStream| quote!((u64::from(#high) << 32) | u64::from(#low));
        match self.resolve(ty) {
            Type::Int => {
                let word = word();
                quote!(#word.cast_signed())
            }
            Type::Hyper => {
                let long = long(word(), word());
                quote!((#long).cast_signed())
            }
            Type::UnsignedHyper => long(word(), word()),
            Type::Float => {
                let word = word();
                quote!(f32::from_bits(#word))
            }
            Type::Double => {
                let long = long(word(), word());
                quote!(f64::from_bits(#long))
            }
            Type::Named(id) => {
                let Form::Struct { fields, .. } = &self.types[id.0].form else { return word() };
                let (rust, idents) = (&self.names[id.0], self.idents(fields));
                let values = fields.iter().map(|field| self.decode_words(&field.ty, next));
                quote!(#rust { #(#idents: #values),* })
            }
            _ => word(),
        }
    }
}

/// An expression for the bound of a length.
fn bound(max: Option<u32>) -> TokenStream {
    match max {
        Some(max) => {
            let max = Literal::u32_unsuffixed(max);
            quote!(#max)
        }
        None => quote!(usize::MAX),
    }
}
