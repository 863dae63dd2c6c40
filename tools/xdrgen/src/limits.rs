//! Limits of values on the stack and of arguments, and elements with an empty encoding.

use std::collections::HashSet;

use crate::errors::Problems;
use crate::schema::{Form, Name, Schema, Type, TypeDef, TypeId};

/// Limit of the bytes of a type. Its values are decoded on the stack of a shard, in a few copies.
const MAX_BYTES: u64 = 32 << 10;
/// Limit of the bytes of a type and the largest types nested in it, one per level, which are on the stack at the same
/// time.
const MAX_NESTED: u64 = 4 * MAX_BYTES;
/// Limit of the bytes of a type that contains itself, with its nested types. All levels are on the stack together.
const MAX_RECURSIVE: u64 = MAX_NESTED / MAX_DEPTH;
/// Limit of the levels of a type that contains itself: `rpcrdma_xdr::MAX_DEPTH`.
const MAX_DEPTH: u64 = 64;
/// Limit of the arguments of a procedure: the longest tuple that `rpcrdma-xdr` encodes.
const MAX_ARGUMENTS: usize = 12;

/// Size of a type.
#[derive(Clone, Copy, Default)]
struct Extent {
    /// Minimum bytes of XDR.
    xdr: u64,
    /// Approximate bytes of the Rust type, at most.
    rust: u64,
    /// Bytes of all levels of nested types.
    nested: u64,
}

impl Extent {
    const fn new(xdr: u64, rust: u64) -> Self {
        Self { xdr, rust, nested: 0 }
    }

    fn and(self, next: Self) -> Self {
        let nested = self.nested.max(next.nested);
        Self { nested, ..Self::new(self.xdr.saturating_add(next.xdr), self.rust.saturating_add(next.rust)) }
    }

    fn or(self, other: Self) -> Self {
        Self { nested: self.nested.max(other.nested), ..Self::new(self.xdr.min(other.xdr), self.rust.max(other.rust)) }
    }

    /// The extent of a type that holds this one.
    fn within(self, xdr: u64, rust: u64) -> Self {
        Self { xdr, rust, nested: self.nested.saturating_add(self.rust) }
    }
}

/// Reports types and arguments beyond the limits. The recursion of the schema was checked before.
pub(crate) fn check(schema: &Schema, problems: &mut Problems) {
    let mut extents = Extents { schema, cache: vec![None; schema.types.len()] };
    let recursive: HashSet<TypeId> = schema.types.iter().flat_map(|def| def.form.recursive()).collect();
    for (index, def) in schema.types.iter().enumerate() {
        let Extent { rust, nested, .. } = extents.named(TypeId(index));
        let (what, bytes, max) = match rust > MAX_BYTES {
            true => ("takes", rust, MAX_BYTES),
            false if recursive.contains(&TypeId(index)) => {
                ("contains itself, and with the types in it takes", nested.saturating_add(rust), MAX_RECURSIVE)
            }
            false => ("with the types in it takes", nested.saturating_add(rust), MAX_NESTED),
        };
        if bytes > max {
            let message = format!("`{}` {what} {bytes} bytes by value, which exceeds {max}", def.name.text);
            problems
                .add(&def.name.at, message)
                .help("`<n>`, a variable-length array, stays in the message, but its encoding starts with its length");
        }
        for (name, ty) in declared_types(def) {
            if extents.has_empty_elements(ty) {
                problems.add(&name.at, format!("elements of `{}` have an empty encoding", name.text));
            }
        }
    }
    let versions = schema.programs.iter().flat_map(|program| &program.versions);
    for procedure in versions.flat_map(|version| &version.procedures) {
        let (name, count) = (&procedure.name, procedure.arguments.len());
        let rust = procedure.arguments.iter().fold(Extent::default(), |all, ty| all.and(extents.extent_of(ty))).rust;
        if rust > MAX_BYTES && count > 1 {
            let message = format!("arguments of `{}` take {rust} bytes by value, which exceeds {MAX_BYTES}", name.text);
            problems.add(&name.at, message);
        }
        if count > MAX_ARGUMENTS {
            problems.add(&name.at, format!("{count} arguments exceed {MAX_ARGUMENTS}")).help("a struct has any number");
        }
    }
}

/// Types of a definition's fields, or the type that a typedef stands for.
fn declared_types(def: &TypeDef) -> Vec<(&Name, &Type)> {
    match &def.form {
        Form::Enum(_) => Vec::new(),
        Form::Alias(ty) => vec![(&def.name, ty)],
        Form::Struct { fields, .. } => fields.iter().map(|field| (&field.name, &field.ty)).collect(),
        Form::Union(union) => {
            let arms = union.arms.iter().filter_map(|arm| arm.field.as_ref()).chain(union.default.iter().flatten());
            arms.map(|field| (&field.name, &field.ty)).collect()
        }
    }
}

/// Computes the extents of types.
struct Extents<'s> {
    schema: &'s Schema,
    cache: Vec<Option<Extent>>,
}

impl Extents<'_> {
    fn extent_of(&mut self, ty: &Type) -> Extent {
        match ty {
            Type::Void => Extent::default(),
            Type::Int | Type::UnsignedInt | Type::Float | Type::Bool => Extent::new(4, 4),
            Type::Hyper | Type::UnsignedHyper | Type::Double => Extent::new(8, 8),
            Type::FixedOpaque(len) => Extent::new(u64::from(*len), u64::from(*len)),
            Type::Opaque { .. } | Type::Text { .. } => Extent::new(4, 24),
            Type::Array(inner, _) => self.extent_of(inner).within(4, 24),
            Type::List(id) => self.named(*id).within(4, 24),
            Type::Optional(inner) => {
                let extent = self.extent_of(inner);
                extent.within(4, extent.rust.saturating_add(8))
            }
            Type::FixedArray(inner, count) => {
                let (extent, count) = (self.extent_of(inner), u64::from(*count));
                extent.within(extent.xdr.saturating_mul(count), extent.rust.saturating_mul(count))
            }
            Type::Named(id) => self.named(*id),
            // The type has at least a discriminant, a count or a pointer.
            Type::Recursive(_) => Extent::new(4, 24),
        }
    }

    /// Extent of a type as a field of another one.
    fn nested(&mut self, ty: &Type) -> Extent {
        let extent = self.extent_of(ty);
        extent.within(extent.xdr, extent.rust)
    }

    fn named(&mut self, id: TypeId) -> Extent {
        if let Some(extent) = self.cache[id.0] {
            return extent;
        }
        // This value ends any recursion.
        self.cache[id.0] = Some(Extent::default());
        let extent = match &self.schema.types[id.0].form {
            Form::Enum(_) => Extent::new(4, 4),
            Form::Alias(ty) => self.nested(ty),
            Form::Struct { fields, .. } => {
                fields.iter().fold(Extent::default(), |all, field| all.and(self.nested(&field.ty)))
            }
            Form::Union(union) => {
                let cases = union.arms.iter().map(|arm| &arm.field).chain(&union.default);
                let arms = cases.map(|arm| arm.as_ref().map_or_else(Extent::default, |field| self.nested(&field.ty)));
                Extent::new(4, 8).and(arms.reduce(Extent::or).unwrap_or_default())
            }
        };
        self.cache[id.0] = Some(extent);
        extent
    }

    /// Whether the type has elements that take no bytes. A short message could then stand for any number of values.
    fn has_empty_elements(&mut self, ty: &Type) -> bool {
        match ty {
            Type::Array(inner, _) | Type::FixedArray(inner, _) => {
                self.extent_of(inner).xdr == 0 || self.has_empty_elements(inner)
            }
            Type::Optional(inner) => self.has_empty_elements(inner),
            _ => false,
        }
    }
}
