//! The schema with names and properties of the Rust types.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::iter::successors;

use proc_macro2::{Ident, TokenStream};
use quote::quote;

use super::names::{Scope, common_prefix};
use crate::schema::{Constant, Field, Form, Name, Schema, Type, TypeDef, TypeId, Union};

/// Names that types must not hide.
const PRELUDE: [&str; 8] = ["Default", "Err", "From", "None", "Ok", "Option", "Result", "Some"];

/// A schema, with names and properties of its Rust types.
pub(super) struct Model {
    pub(super) types: Vec<TypeDef>,
    pub(super) names: Vec<Ident>,
    /// Path of the crate `rpcrdma-xdr`.
    pub(super) xdr: TokenStream,
    facts: Vec<OnceCell<Facts>>,
    /// Aliases that contain themselves through aliases only.
    circular: HashSet<TypeId>,
    /// Number of types of the specification. Structs around arguments and results follow them.
    specified: usize,
}

/// Properties of a type.
#[derive(Clone, Copy)]
pub(super) struct Facts {
    /// Whether the type borrows from the message.
    pub(super) borrows: bool,
    /// Encoded length, if it is fixed.
    pub(super) len: Option<usize>,
    pub(super) has_default: bool,
    pub(super) is_eq: bool,
    /// Approximate size of the Rust type, in bytes.
    pub(super) size: usize,
    /// Whether the type has only numbers, so that any words are a valid value.
    pub(super) reads_words: bool,
    /// Whether the type has only numbers, enums and bools.
    pub(super) writes_words: bool,
}

impl Facts {
    const fn word(len: usize) -> Self {
        Self {
            borrows: false,
            len: Some(len),
            has_default: true,
            is_eq: true,
            size: len,
            reads_words: true,
            writes_words: true,
        }
    }

    const BORROWED: Self = Self { borrows: true, ..Self::word(24).of_varying_length() };

    /// Returns these facts for a type of varying length.
    const fn of_varying_length(self) -> Self {
        Self { len: None, ..self.not_words() }
    }

    /// Returns these facts for a type that is not a sequence of words.
    const fn not_words(self) -> Self {
        Self { reads_words: false, writes_words: false, ..self }
    }

    /// Returns the facts of a value of one type followed by a value of another type.
    fn and(self, other: Self) -> Self {
        Self {
            borrows: self.borrows || other.borrows,
            len: self.len.zip(other.len).and_then(|(a, b)| a.checked_add(b)),
            has_default: self.has_default && other.has_default,
            is_eq: self.is_eq && other.is_eq,
            size: self.size.saturating_add(other.size),
            reads_words: self.reads_words && other.reads_words,
            writes_words: self.writes_words && other.writes_words,
        }
    }
}

impl Model {
    pub(super) fn new(schema: &Schema, xdr: TokenStream) -> Self {
        let mut types = schema.types.clone();
        for ty in &mut types {
            if let Form::Union(union) = &ty.form
                && let Some(value) = optional_type(union)
            {
                ty.form = Form::Alias(Type::Optional(Box::new(value)));
            }
        }
        let mut scope = Scope::with(&PRELUDE);
        let names = types.iter().map(|ty| scope.camel(&ty.name.text)).collect();
        let facts = types.iter().map(|_| OnceCell::new()).collect();
        let specified = types.len();
        let circular = find_circular_aliases(&types);
        let mut model = Self { types, names, xdr, facts, circular, specified };
        model.add_argument_newtypes(schema, &mut scope);
        model
    }

    /// Adds structs around arguments and results that have no name and do not implement `Encode`.
    fn add_argument_newtypes(&mut self, schema: &Schema, scope: &mut Scope) {
        let procedures =
            schema.programs.iter().flat_map(|program| &program.versions).flat_map(|version| &version.procedures);
        for ty in procedures.flat_map(|procedure| procedure.arguments.iter().chain([&procedure.results])) {
            if encodes_itself(ty) || self.find_newtype(ty).is_some() {
                continue;
            }
            let name = if matches!(ty, Type::Text { .. }) { "text" } else { "data" };
            self.names.push(scope.camel(name));
            let name = Name { doc: vec!["An argument or result.".into()], ..Name::new(name, 0..0) };
            self.types.push(TypeDef { name, form: Form::Alias(ty.clone()) });
            self.facts.push(OnceCell::new());
        }
    }

    /// Finds the struct around a type without name.
    fn find_newtype(&self, ty: &Type) -> Option<TypeId> {
        let is_match = |index: &usize| matches!(&self.types[*index].form, Form::Alias(inner) if inner == ty);
        (self.specified..self.types.len()).find(is_match).map(TypeId)
    }

    /// The struct that stands for an alias, and the type inside.
    ///
    /// An alias is a struct if its type does not implement `Encode`, or contains the alias.
    pub(super) fn newtype(&self, ty: &Type) -> Option<(&Ident, &Type)> {
        let id = id_of(ty)?;
        match &self.types[id.0].form {
            Form::Alias(inner) if !encodes_itself(inner) || self.circular.contains(&id) => {
                Some((&self.names[id.0], inner))
            }
            _ => None,
        }
    }

    /// The type that an alias stands for, unless the alias is a struct.
    pub(super) fn resolve<'s>(&'s self, ty: &'s Type) -> &'s Type {
        match ty {
            Type::Named(id) => match &self.types[id.0].form {
                Form::Alias(inner) if self.newtype(ty).is_none() => self.resolve(inner),
                _ => ty,
            },
            _ => ty,
        }
    }

    pub(super) fn facts(&self, ty: &Type) -> Facts {
        match ty {
            Type::Int | Type::UnsignedInt => Facts::word(4),
            Type::Hyper | Type::UnsignedHyper => Facts::word(8),
            Type::Float => Facts { is_eq: false, ..Facts::word(4) },
            Type::Double => Facts { is_eq: false, ..Facts::word(8) },
            Type::Bool => Facts { reads_words: false, ..Facts::word(4) },
            Type::Void => Facts::word(0),
            Type::FixedOpaque(len) => {
                let bytes = (*len as usize).next_multiple_of(4);
                Facts { has_default: *len <= 32, ..Facts::word(bytes).not_words() }
            }
            Type::Opaque { .. } | Type::Text { .. } => Facts::BORROWED,
            Type::FixedArray(ty, count) => {
                let inner = self.facts(ty);
                let len = inner.len.and_then(|len| len.checked_mul(*count as usize));
                let size = inner.size.saturating_mul(*count as usize);
                Facts { len, size, has_default: inner.has_default && *count <= 32, ..inner.not_words() }
            }
            Type::Array(..) | Type::List(_) => Facts { is_eq: false, ..Facts::BORROWED },
            Type::Recursive(_) => Facts { is_eq: false, has_default: false, ..Facts::BORROWED },
            Type::Optional(ty) => Facts { has_default: true, ..self.facts(ty).of_varying_length() },
            Type::Named(id) => *self.facts[id.0].get_or_init(|| self.compute_facts(id.0)),
        }
    }

    fn compute_facts(&self, index: usize) -> Facts {
        let form = &self.types[index].form;
        let all = || form.types().into_iter().fold(Facts::word(0), |facts, ty| facts.and(self.facts(ty)));
        match form {
            Form::Enum(values) => {
                let has_default = values.iter().any(|value| value.value == 0);
                Facts { has_default, reads_words: false, ..Facts::word(4) }
            }
            Form::Struct { .. } | Form::Alias(_) => all(),
            Form::Union(_) => Facts { has_default: false, ..all().of_varying_length() },
        }
    }

    /// The Rust type, with lifetime `life`. Types of the file are in module `at`.
    pub(super) fn rust_type(&self, ty: &Type, life: &TokenStream, at: &TokenStream) -> TokenStream {
        let xdr = &self.xdr;
        match ty {
            Type::Int => quote!(i32),
            Type::UnsignedInt => quote!(u32),
            Type::Hyper => quote!(i64),
            Type::UnsignedHyper => quote!(u64),
            Type::Float => quote!(f32),
            Type::Double => quote!(f64),
            Type::Bool => quote!(bool),
            Type::Void => quote!(()),
            Type::FixedOpaque(len) => {
                let len = *len as usize;
                let len = proc_macro2::Literal::usize_unsuffixed(len);
                quote!([u8; #len])
            }
            Type::Opaque { is_bulk, .. } | Type::Text { is_bulk, .. } if *is_bulk => quote!(#xdr::Bulk<#life>),
            Type::Opaque { .. } | Type::Text { .. } => quote!(&#life [u8]),
            Type::FixedArray(ty, count) => {
                let ty = self.rust_type(ty, life, at);
                let count = proc_macro2::Literal::u32_unsuffixed(*count);
                quote!([#ty; #count])
            }
            Type::Array(ty, _) => {
                let ty = self.rust_type(ty, life, at);
                quote!(#xdr::Array<#life, #ty>)
            }
            Type::Optional(ty) => {
                let ty = self.rust_type(ty, life, at);
                quote!(Option<#ty>)
            }
            Type::List(id) => {
                let ty = self.rust_type(&Type::Named(*id), life, at);
                quote!(#xdr::List<#life, #ty>)
            }
            Type::Recursive(id) => {
                // A recursive type borrows, because it contains a view of itself.
                let name = &self.names[id.0];
                quote!(#xdr::Recursive<#life, #at #name<#life>>)
            }
            Type::Named(id) => {
                let name = &self.names[id.0];
                if self.facts(ty).borrows { quote!(#at #name<#life>) } else { quote!(#at #name) }
            }
        }
    }

    /// The Rust type of an argument or result.
    pub(super) fn argument(&self, ty: &Type, life: &TokenStream) -> TokenStream {
        let named = self.find_newtype(ty).filter(|_| !encodes_itself(ty)).map(Type::Named);
        self.rust_type(named.as_ref().unwrap_or(ty), life, &quote!(super::))
    }

    /// Names of the fields of a struct.
    pub(super) fn idents(&self, fields: &[Field]) -> Vec<Ident> {
        let mut scope = Scope::default();
        fields.iter().map(|field| scope.snake(&field.name.text)).collect()
    }

    /// Variants of an enum.
    pub(super) fn variants(&self, values: &[Constant]) -> Vec<Ident> {
        let names: Vec<_> = values.iter().map(|value| &*value.name.text).collect();
        let prefix = common_prefix(&names);
        let mut scope = Scope::default();
        names.iter().map(|name| scope.camel(&name[prefix..])).collect()
    }

    /// The enum that `ty` stands for, and its values.
    pub(super) fn enumeration(&self, ty: &Type) -> Option<(TypeId, &[Constant])> {
        match (&self.types[id_of(ty)?.0].form, id_of(ty)?) {
            (Form::Enum(values), id) => Some((id, values)),
            (Form::Alias(ty), _) => self.enumeration(ty),
            _ => None,
        }
    }
}

fn id_of(ty: &Type) -> Option<TypeId> {
    if let Type::Named(id) = ty { Some(*id) } else { None }
}

/// Aliases that contain themselves through aliases only, for which Rust has no type alias.
fn find_circular_aliases(types: &[TypeDef]) -> HashSet<TypeId> {
    let inside = |id: &TypeId| match &types[id.0].form {
        Form::Alias(ty) => ty.named().or(ty.recursive()),
        _ => None,
    };
    let recursive = types.iter().flat_map(|def| def.form.recursive());
    recursive.filter(|id| successors(inside(id), inside).take(types.len()).any(|inner| inner == *id)).collect()
}

/// Whether the Rust type implements `Decode` and `Encode`, including all bounds.
pub(super) fn encodes_itself(ty: &Type) -> bool {
    match ty {
        Type::Opaque { .. } | Type::Text { .. } | Type::Array(..) => false,
        Type::Optional(ty) => encodes_itself(ty),
        _ => true,
    }
}

/// The type in the TRUE arm of a union whose other arm is `void`. Such a union is encoded like optional data.
fn optional_type(union: &Union) -> Option<Type> {
    let arm = |value| union.arms.iter().find(|arm| arm.cases.iter().any(|case| case.value == value));
    let some = arm(1)?.field.as_ref()?;
    let none = arm(0).map_or(union.default.as_ref(), |arm| Some(&arm.field))?;
    (union.switch.ty == Type::Bool && none.is_none()).then(|| some.ty.clone())
}
