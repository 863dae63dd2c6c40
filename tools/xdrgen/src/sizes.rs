//! Encoded sizes of types.

use crate::schema::{Field, Form, Schema, Type, TypeId};

/// Size of data without a bound.
pub(crate) const UNBOUNDED: u64 = u64::MAX;

/// Limits of the encoded values of a type.
#[derive(Clone, Debug, Default)]
pub(crate) struct Size {
    /// Minimum bytes without eligible items.
    pub(crate) min: u64,
    /// Maximum bytes without eligible items.
    pub(crate) max: u64,
    /// An item that makes `max` unbounded.
    pub(crate) unbounded: Option<String>,
    /// Maximum eligible items.
    pub(crate) count: u64,
    /// Maximum bytes of each eligible item.
    pub(crate) max_len: u64,
    /// Maximum bytes before the first eligible item, including the word of its length.
    pub(crate) head: u64,
    /// Whether there is always an eligible item.
    always_has_item: bool,
}

impl Size {
    fn bytes(bytes: u64) -> Self {
        Self::between(bytes, bytes)
    }

    fn between(min: u64, max: u64) -> Self {
        Self { min, max, ..Self::default() }
    }

    /// Size of this value followed by another one.
    fn then(self, next: Self) -> Self {
        let head = match (self.always_has_item, next.count) {
            (true, _) | (_, 0) => self.head,
            _ => self.head.max(self.max.saturating_add(next.head)),
        };
        Self {
            min: self.min.saturating_add(next.min),
            max: self.max.saturating_add(next.max),
            unbounded: self.unbounded.or(next.unbounded),
            count: self.count.saturating_add(next.count),
            max_len: self.max_len.max(next.max_len),
            head,
            always_has_item: self.always_has_item || next.always_has_item,
        }
    }

    /// Size of either this value or another one.
    fn or(self, other: Self) -> Self {
        Self {
            min: self.min.min(other.min),
            max: self.max.max(other.max),
            unbounded: self.unbounded.or(other.unbounded),
            count: self.count.max(other.count),
            max_len: self.max_len.max(other.max_len),
            head: self.head.max(other.head),
            always_has_item: self.always_has_item && other.always_has_item,
        }
    }

    /// Names the item without a bound, unless an inner item was named.
    fn name_unbounded(mut self, name: impl FnOnce() -> String) -> Self {
        if self.max == UNBOUNDED && self.unbounded.is_none() {
            self.unbounded = Some(name());
        }
        self
    }
}

/// Computes the sizes of types of a schema.
pub(crate) struct Sizes<'s> {
    schema: &'s Schema,
    cache: Vec<Option<Size>>,
    /// Types with eligible items that are elements of arrays or lists, optional data, or inside their own type.
    repeated: Vec<bool>,
}

impl<'s> Sizes<'s> {
    pub(crate) fn new(schema: &'s Schema) -> Self {
        Self { schema, cache: vec![None; schema.types.len()], repeated: vec![false; schema.types.len()] }
    }

    /// Size of consecutive values.
    pub(crate) fn sequence<'t>(&mut self, types: impl IntoIterator<Item = &'t Type>) -> Size {
        types.into_iter().fold(Size::default(), |size, ty| size.then(self.size_of(ty)))
    }

    pub(crate) fn size_of(&mut self, ty: &Type) -> Size {
        match ty {
            Type::Void => Size::default(),
            Type::Int | Type::UnsignedInt | Type::Float | Type::Bool => Size::bytes(4),
            Type::Hyper | Type::UnsignedHyper | Type::Double => Size::bytes(8),
            Type::FixedOpaque(len) => Size::bytes(u64::from(*len).next_multiple_of(4)),
            Type::Opaque { max, is_bulk: true } | Type::Text { max, is_bulk: true } => {
                let max_len = max.map_or(UNBOUNDED, u64::from);
                Size { count: 1, max_len, head: 4, always_has_item: true, ..Size::bytes(4) }
            }
            Type::Opaque { max, .. } | Type::Text { max, .. } => {
                Size::between(4, max.map_or(UNBOUNDED, |max| 4 + u64::from(max).next_multiple_of(4)))
            }
            Type::FixedArray(inner, len) => self.repeat(inner, u64::from(*len), 0),
            Type::Array(inner, max) => self.repeat(inner, max.map_or(UNBOUNDED, u64::from), 4),
            Type::Optional(inner) => self.repeat(inner, 1, 4),
            Type::List(id) => {
                let size = self.repeat(&Type::Named(*id), UNBOUNDED, 4);
                size.name_unbounded(|| format!("list of `{}`", self.schema.types[id.0].name.text))
            }
            Type::Named(id) => self.named(*id),
            Type::Recursive(id) => {
                self.repeated[id.0] = true;
                Size::between(4, UNBOUNDED)
                    .name_unbounded(|| format!("`{}` contains itself and", self.schema.types[id.0].name.text))
            }
        }
    }

    /// Size of at most `count` values after `length` bytes.
    fn repeat(&mut self, inner: &Type, count: u64, length: u64) -> Size {
        let size = self.size_of(inner);
        if let Some(id) = inner.named().filter(|_| size.count > 0) {
            self.repeated[id.0] = true;
        }
        if count == UNBOUNDED {
            return Size::between(length, UNBOUNDED);
        }
        let min = if length == 0 { size.min.saturating_mul(count) } else { length };
        Size { unbounded: size.unbounded, ..Size::between(min, size.max.saturating_mul(count).saturating_add(length)) }
    }

    /// For each type, whether it is inside an array, list, optional or recursive data that has eligible items.
    pub(crate) fn inside_repeated(mut self) -> Vec<bool> {
        let mut pending: Vec<usize> = (0..self.repeated.len()).filter(|i| self.repeated[*i]).collect();
        while let Some(i) = pending.pop() {
            for inner in self.schema.types[i].form.contained() {
                if !std::mem::replace(&mut self.repeated[inner.0], true) {
                    pending.push(inner.0);
                }
            }
        }
        self.repeated
    }

    fn named(&mut self, id: TypeId) -> Size {
        if let Some(size) = &self.cache[id.0] {
            return size.clone();
        }
        let def = &self.schema.types[id.0];
        let owner = &def.name.text;
        let mut field =
            |field: &Field| self.size_of(&field.ty).name_unbounded(|| format!("`{owner}.{}`", field.name.text));
        let size = match &def.form {
            Form::Enum(_) => Size::bytes(4),
            Form::Alias(ty) => self.size_of(ty).name_unbounded(|| format!("`{owner}`")),
            Form::Struct { fields, .. } => fields.iter().fold(Size::default(), |size, next| size.then(field(next))),
            Form::Union(union) => {
                let cases = union.arms.iter().map(|arm| &arm.field).chain(&union.default);
                let arms: Vec<Size> = cases.map(|arm| arm.as_ref().map_or_else(Size::default, &mut field)).collect();
                Size::bytes(4).then(arms.into_iter().reduce(Size::or).unwrap_or_default())
            }
        };
        self.cache[id.0] = Some(size.clone());
        size
    }
}
