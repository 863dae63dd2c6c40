//! Generation of unions as enums with a variant for each case.

use std::collections::HashSet;

use proc_macro2::{Ident, Literal, TokenStream};
use quote::{format_ident, quote};

use super::codec::Value;
use super::docs;
use super::model::Model;
use super::names::{Scope, common_prefix};
use super::types::{Codec, derives};
use crate::schema::{Case, Field, Name, Type, TypeId, Union};

/// Name of the default variant's field that holds the discriminant. All other fields are named `value`.
const SWITCH_FIELD: &str = "switch";

/// Bytes that the largest variant may exceed the second largest by before the lint `large_enum_variant` is allowed. The
/// lint warns from 200 bytes, but sizes are approximate here.
const UNEVEN_SIZES: usize = 150;

/// A variant of the Rust enum.
struct Variant<'s> {
    name: Ident,
    doc: TokenStream,
    /// Pattern of the decoded discriminant.
    pattern: TokenStream,
    /// Encoded discriminant; `None` in the default arm, whose variant holds it.
    word: Option<Literal>,
    /// Name of the arm.
    what: &'s str,
    /// Names and types of the variant's fields.
    parts: Vec<(Ident, &'s Type)>,
}

impl Model {
    /// Generates the enum of a union, its codec and, if it is a result, its conversions.
    pub(super) fn union(&self, id: TypeId, doc: &TokenStream, union: &Union) -> TokenStream {
        let (xdr, rust, name, facts) =
            (&self.xdr, &self.names[id.0], &self.types[id.0].name.text, self.facts(&Type::Named(id)));
        let life = if facts.borrows { quote!(<'a>) } else { quote!() };
        let (mut variants, mut decodes, mut lens, mut encodes) = (vec![], vec![], vec![], vec![]);
        let (all, is_complete) = self.union_variants(union);
        for variant in &all {
            let Variant { name: variant, doc, pattern, word, what, parts } = variant;
            let names: Vec<_> = parts.iter().map(|(name, _)| name).collect();
            let tuple = |parts: &[TokenStream]| (!parts.is_empty()).then(|| quote!((#(#parts),*)));
            let types: Vec<_> = parts.iter().map(|(_, ty)| self.rust_type(ty, &quote!('a), &quote!())).collect();
            let types = tuple(&types);
            variants.push(quote!(#doc #variant #types));

            let decode = parts.iter().map(|(held, ty)| match &*held.to_string() {
                SWITCH_FIELD => quote!(switch),
                _ => self.decode(ty, &format!("{name}.{what}")),
            });
            let decode = tuple(&decode.collect::<Vec<_>>());
            decodes.push(quote!(#pattern => Ok(Self::#variant #decode)));

            let mut fixed = if word.is_some() { 4 } else { 0 };
            let (mut len_pattern, mut len) = (vec![], vec![]);
            for (name, ty) in parts {
                if let Some(len) = self.facts(ty).len {
                    fixed += len;
                    len_pattern.push(quote!(_));
                } else {
                    len.push(self.len(ty, &Value::reference(quote!(#name))));
                    len_pattern.push(quote!(#name));
                }
            }
            let (len_pattern, fixed) = (tuple(&len_pattern), Literal::usize_unsuffixed(fixed));
            lens.push(quote!(Self::#variant #len_pattern => #fixed #(+ #len)*));

            let parts = parts.iter().map(|(name, ty)| self.encode(ty, &Value::reference(quote!(#name))));
            let word = word.iter().map(|word| quote!(encoder.u32(#word)));
            let encode: Vec<_> = word.chain(parts).collect();
            let encode_pattern = tuple(&names.iter().map(|name| quote!(#name)).collect::<Vec<_>>());
            encodes.push(match &encode[..] {
                [first @ .., last] => quote!(Self::#variant #encode_pattern => { #(#first?;)* #last }),
                [] => quote!(),
            });
        }
        // The default variant must not hold a discriminant that has a case of its own.
        if let [cases @ .., Variant { name, word: None, .. }] = &all[..] {
            let patterns = cases.iter().map(|case| &case.pattern);
            let held = quote!(Self::#name(#(#patterns)|*, ..));
            encodes.insert(0, quote!(#held => Err(#xdr::EncodeError::switch()),));
        }
        if !is_complete {
            decodes.push(quote!(_ => Err(decoder.unknown(#name))));
        }
        let switch = self.decode(&union.switch.ty, &format!("{name}.{}", union.switch.name.text));
        let codec = Codec {
            decode: quote!(match #switch { #(#decodes,)* }),
            len: quote!(match self { #(#lens,)* }),
            encode: quote!(match self { #(#encodes)* }),
            parts: all.len(),
        };
        let (codec, derives) = (self.codec(id, facts, codec), derives(facts));
        let size = |variant: &Variant<'_>| variant.parts.iter().map(|(_, ty)| self.facts(ty).size).sum();
        let mut sizes: Vec<usize> = all.iter().map(size).collect();
        sizes.sort_unstable();
        // Large variants are not in a `Box`, because values are views that exist on the stack during one call.
        let is_uneven = matches!(sizes[..], [.., next_largest, largest] if largest - next_largest > UNEVEN_SIZES);
        let lint = is_uneven.then(|| quote!(#[allow(clippy::large_enum_variant, clippy::allow_attributes)]));
        let results = self.result_conversions(id, &life, union, &all);
        quote!(#doc #derives #lint pub enum #rust #life { #(#variants,)* } #codec #results)
    }

    /// Generates conversions of a union that is a result.
    ///
    /// Such a union is on an enum, and has an arm for its value 0 and a default arm.
    fn result_conversions(
        &self,
        id: TypeId,
        life: &TokenStream,
        union: &Union,
        all: &[Variant<'_>],
    ) -> Option<TokenStream> {
        let [Variant { name: ok, parts: good, .. }, Variant { name: default, parts: bad, word: None, .. }] = all else {
            return None;
        };
        self.enumeration(&union.switch.ty).filter(|_| union.arms[0].cases[0].value == 0)?;
        let rust = &self.names[id.0];
        let one_or_tuple = |parts: &[TokenStream]| if let [one] = parts { one.clone() } else { quote!((#(#parts),*)) };
        let split = |parts: &[(Ident, &Type)]| -> (Vec<_>, Vec<_>) {
            parts.iter().map(|(name, ty)| (quote!(#name), self.rust_type(ty, &quote!('a), &quote!()))).unzip()
        };
        let ((good, good_types), (bad, bad_types)) = (split(good), split(bad));
        let held = (!good.is_empty()).then(|| quote!((#(#good),*)));
        let [good, good_type, bad_value, bad_type] =
            [&good, &good_types, &bad, &bad_types].map(|parts| one_or_tuple(parts));
        let switch_type = &bad_types[0];
        Some(quote! {
            impl #life #rust #life {
                /// Returns the results, or the status of a failure.
                ///
                /// # Errors
                /// The status of a failed call.
                pub fn into_result(self) -> Result<#good_type, #switch_type> {
                    match self {
                        Self::#ok #held => Ok(#good),
                        Self::#default(switch, ..) => Err(switch),
                    }
                }
            }

            impl #life From<Result<#good_type, #bad_type>> for #rust #life {
                fn from(result: Result<#good_type, #bad_type>) -> Self {
                    match result {
                        Ok(#good) => Self::#ok #held,
                        Err(#bad_value) => Self::#default(#(#bad),*),
                    }
                }
            }
        })
    }

    /// Returns the variants, and whether each value of the discriminant has one.
    fn union_variants<'s>(&self, union: &'s Union) -> (Vec<Variant<'s>>, bool) {
        let switch = self.resolve(&union.switch.ty);
        let values = self.enumeration(switch).map(|(id, values)| (id, values, self.variants(values)));
        let cases: Vec<_> = union.arms.iter().flat_map(|arm| arm.cases.iter().map(move |case| (case, arm))).collect();
        let case_values: HashSet<_> = cases.iter().map(|(case, _)| case.value).collect();
        let is_covered = match &values {
            Some((_, values, _)) => values.iter().all(|value| case_values.contains(&value.value)),
            None => *switch == Type::Bool && case_values.len() == 2,
        };
        let prefix = common_prefix(&cases.iter().map(|(case, _)| &*case.name.text).collect::<Vec<_>>());
        let mut scope = Scope::default();
        let parts = |field: &'s Option<Field>| field.iter().map(|field| (format_ident!("value"), &field.ty));
        let mut variants: Vec<_> = (cases.iter())
            .map(|(case, arm)| {
                let (name, pattern) = match &values {
                    Some((id, values, variants)) => {
                        let at = values.iter().position(|value| value.value == case.value).unwrap_or_default();
                        let (rust, variant) = (&self.names[id.0], &variants[at]);
                        (scope.declare(variant.to_string()), quote!(#rust::#variant))
                    }
                    None => basic_case(case, prefix, switch, &mut scope),
                };
                let (doc, what) = arm_doc_and_name(&arm.field, &case.name.text);
                let word = Some(Literal::u32_unsuffixed(case.value as u32));
                Variant { name, doc, pattern, word, what, parts: parts(&arm.field).collect() }
            })
            .collect();
        if let Some(default) = &union.default
            && !is_covered
        {
            let (name, (doc, what)) = (scope.camel("default"), arm_doc_and_name(default, "default"));
            let switch_field = (format_ident!("{}", SWITCH_FIELD), &union.switch.ty);
            let held = [switch_field].into_iter().chain(parts(default)).collect();
            variants.push(Variant { name, doc, pattern: quote!(switch), word: None, what, parts: held });
        }
        (variants, is_covered || union.default.is_some())
    }
}

/// Name and pattern of a case whose discriminant is a number or bool.
fn basic_case(case: &Case, prefix: usize, switch: &Type, scope: &mut Scope) -> (Ident, TokenStream) {
    let (number, text) = (Literal::i128_unsuffixed(case.value), &case.name.text);
    if *switch == Type::Bool {
        let value = case.value != 0;
        (scope.camel(&value.to_string()), quote!(#value))
    } else if text.starts_with(|c: char| c.is_ascii_alphabetic()) {
        (scope.camel(&text[prefix..]), quote!(#number))
    } else {
        (scope.camel(&format!("case_{}", text.replace('-', "minus_"))), quote!(#number))
    }
}

/// Documentation and name of an arm.
fn arm_doc_and_name<'s>(arm: &'s Option<Field>, text: &str) -> (TokenStream, &'s str) {
    arm.as_ref().map_or((docs(&Name::new("", 0..0), text), ""), |field| (docs(&field.name, text), &field.name.text))
}
