//! Recursive types: lists by optional pointers, and views of types inside themselves.

use std::mem;
use std::ops::Range;

use crate::errors::Problems;
use crate::schema::{Field, Form, Schema, Type, TypeId};

/// Limit of nested named types.
const MAX_DEPTH: usize = 64;

impl Schema {
    /// Returns the type that a typedef, or a chain of typedefs, stands for.
    #[must_use]
    pub fn resolve<'s>(&'s self, mut ty: &'s Type) -> &'s Type {
        // The limit ends a cycle of typedefs.
        for _ in 0..MAX_DEPTH {
            match ty {
                Type::Named(id) => match &self.types[id.0].form {
                    Form::Alias(inner) => ty = inner,
                    _ => break,
                },
                _ => break,
            }
        }
        ty
    }

    fn is_list(&self, id: TypeId) -> bool {
        matches!(self.types[id.0].form, Form::Struct { is_list: true, .. })
    }
}

/// Finds structures whose last field points to the next one, and makes pointers to them lists.
pub(crate) fn find_lists(schema: &mut Schema, problems: &mut Problems) {
    let mut values = vec![None; schema.types.len()];
    for_each_type(schema, &mut |ty, at| {
        if let Some(id) = direct_value(ty) {
            values[id.0] = Some(at.clone());
        }
    });
    for (i, value_at) in values.into_iter().enumerate() {
        let Form::Struct { fields, .. } = &schema.types[i].form else { continue };
        let Some((last, rest)) = fields.split_last() else { continue };
        let Type::Optional(next) = schema.resolve(&last.ty) else { continue };
        if **next != Type::Named(TypeId(i)) || contains(schema, rest, TypeId(i)) {
            continue;
        }
        if let Some(at) = value_at {
            let name = &schema.types[i].name.text;
            let message = format!(
                "`{name}` is also used by value here, so `{name} *` is not a list: at most {MAX_DEPTH} of them can follow \
                 each other"
            );
            problems.warn(&at, message);
        } else if let Form::Struct { fields, is_list } = &mut schema.types[i].form {
            fields.pop();
            *is_list = true;
        }
    }
    let lists: Vec<bool> = (0..schema.types.len()).map(|i| schema.is_list(TypeId(i))).collect();
    for_each_type(schema, &mut |ty, _| make_lists(ty, &lists));
}

/// Boxes each type inside a value of itself, except for lists.
///
/// A cycle is cut where a structure or union is inside itself, so that typedefs of pointers to it stay pointers.
pub(crate) fn box_recursion(schema: &mut Schema) {
    let mut states = vec![State::New; schema.types.len()];
    let is_alias = |schema: &Schema, i: usize| matches!(schema.types[i].form, Form::Alias(_));
    let (first, last): (Vec<usize>, Vec<usize>) = (0..schema.types.len()).partition(|&i| !is_alias(schema, i));
    for i in first.into_iter().chain(last) {
        box_inside(schema, TypeId(i), 0, &mut states);
    }
}

fn box_inside(schema: &mut Schema, id: TypeId, depth: usize, states: &mut [State]) {
    // Deeper nesting is reported by `check`.
    if depth > MAX_DEPTH || !matches!(states[id.0], State::New) {
        return;
    }
    states[id.0] = State::Open;
    let mut form = mem::replace(&mut schema.types[id.0].form, Form::Enum(Vec::new()));
    for ty in form.types_mut() {
        let Some(named) = ty.named_mut() else { continue };
        let (Type::Named(inner) | Type::List(inner)) = *named else { continue };
        match (&states[inner.0], &named) {
            (State::Open, Type::Named(_)) => *named = Type::Recursive(inner),
            _ => box_inside(schema, inner, depth + 1, states),
        }
    }
    schema.types[id.0].form = form;
    states[id.0] = State::Height(0);
}

/// Replaces pointers to elements of lists by lists.
fn make_lists(ty: &mut Type, lists: &[bool]) {
    match ty {
        Type::Optional(inner) => match **inner {
            Type::Named(id) if lists[id.0] => *ty = Type::List(id),
            _ => make_lists(inner, lists),
        },
        Type::FixedArray(inner, _) | Type::Array(inner, _) => make_lists(inner, lists),
        _ => {}
    }
}

/// The named type whose values `ty` holds without a pointer around them.
fn direct_value(ty: &Type) -> Option<TypeId> {
    match ty {
        Type::Named(id) => Some(*id),
        Type::Optional(inner) if matches!(**inner, Type::Named(_)) => None,
        Type::FixedArray(inner, _) | Type::Array(inner, _) | Type::Optional(inner) => direct_value(inner),
        _ => None,
    }
}

/// Whether `fields` contain the type `id` at any depth.
fn contains(schema: &Schema, fields: &[Field], id: TypeId) -> bool {
    let mut seen = vec![false; schema.types.len()];
    let mut pending: Vec<TypeId> = fields.iter().filter_map(|field| field.ty.named()).collect();
    while let Some(next) = pending.pop() {
        if next == id {
            return true;
        }
        if !mem::replace(&mut seen[next.0], true) {
            pending.extend(schema.types[next.0].form.contained());
        }
    }
    false
}

/// Calls `f` for each declared type, with the position of the declared name.
fn for_each_type(schema: &mut Schema, f: &mut impl FnMut(&mut Type, &Range<usize>)) {
    for def in &mut schema.types {
        if let Form::Alias(ty) = &mut def.form {
            f(ty, &def.name.at);
        }
        def.form.fields_mut().into_iter().for_each(|field| f(&mut field.ty, &field.name.at));
    }
    let versions = schema.programs.iter_mut().flat_map(|program| &mut program.versions);
    for procedure in versions.flat_map(|version| &mut version.procedures) {
        for ty in procedure.arguments.iter_mut().chain([&mut procedure.results]) {
            f(ty, &procedure.name.at);
        }
    }
}

/// Reports types that contain themselves without end or have too many levels of nested types.
pub(crate) fn check(schema: &Schema, problems: &mut Problems) {
    let mut check = DepthCheck { schema, problems, heights: vec![State::New; schema.types.len()] };
    for i in 0..schema.types.len() {
        check.visit(TypeId(i), 0);
    }
    for i in find_endless(schema) {
        let name = &schema.types[i].name;
        let help = "a pointer, an array of variable length or an arm without it ends the recursion";
        problems.add(&name.at, format!("every value of `{}` contains another one", name.text)).help(help);
    }
}

/// Types without a finite value, because every value contains another one.
fn find_endless(schema: &Schema) -> Vec<usize> {
    let inner = |ty: &Type| match ty.elements() {
        Type::Named(id) | Type::Recursive(id) => Some(id.0),
        _ => None,
    };
    // For each type: how many of its parts must be finite so that it is finite, and which types it is a part of.
    let (mut needs, mut users) = (Vec::new(), vec![Vec::new(); schema.types.len()]);
    for (user, def) in schema.types.iter().enumerate() {
        let (parts, is_union): (Vec<Option<usize>>, bool) = match &def.form {
            Form::Union(union) => {
                let arms = union.arms.iter().map(|arm| &arm.field).chain(&union.default);
                (arms.map(|field| inner(&field.as_ref()?.ty)).collect(), true)
            }
            form => (form.types().into_iter().map(inner).collect(), false),
        };
        let count = parts.iter().flatten().count();
        // A union needs only one finite arm.
        needs.push(if is_union { usize::from(count == parts.len()) } else { count });
        parts.into_iter().flatten().for_each(|part| users[part].push(user));
    }
    let mut finite: Vec<usize> = (0..needs.len()).filter(|&i| needs[i] == 0).collect();
    while let Some(i) = finite.pop() {
        for user in mem::take(&mut users[i]) {
            if needs[user] > 0 {
                needs[user] -= 1;
                finite.extend((needs[user] == 0).then_some(user));
            }
        }
    }
    (0..needs.len()).filter(|&i| needs[i] > 0).collect()
}

#[derive(Clone, Copy)]
enum State {
    New,
    /// The types that it contains are being visited.
    Open,
    /// Number of nested levels, including the type itself.
    Height(usize),
}

struct DepthCheck<'a> {
    schema: &'a Schema,
    problems: &'a mut Problems,
    heights: Vec<State>,
}

impl DepthCheck<'_> {
    /// Returns the height of a type, which is nested `depth` levels deep.
    fn visit(&mut self, id: TypeId, depth: usize) -> usize {
        let def = &self.schema.types[id.0];
        match self.heights[id.0] {
            State::Height(height) => return height,
            State::Open => {
                // The type is a list inside its own elements.
                self.problems.add(&def.name.at, format!("`{}` contains itself", def.name.text));
                // A height ends the visit, so that the type is reported once.
                self.heights[id.0] = State::Height(0);
                return 0;
            }
            State::New => self.heights[id.0] = State::Open,
        }
        let mut height = 0;
        if depth <= MAX_DEPTH {
            for inner in def.form.contained() {
                height = height.max(self.visit(inner, depth + 1));
            }
        }
        if depth.max(height) >= MAX_DEPTH {
            self.problems
                .add(&def.name.at, format!("types in `{}` are nested more than {MAX_DEPTH} deep", def.name.text));
            height = 0;
        }
        self.heights[id.0] = State::Height(height + 1);
        height + 1
    }
}

impl Form {
    /// Fields of a structure, or the discriminant and arms of a union.
    pub(crate) fn fields_mut(&mut self) -> Vec<&mut Field> {
        match self {
            Self::Enum(_) | Self::Alias(_) => Vec::new(),
            Self::Struct { fields, .. } => fields.iter_mut().collect(),
            Self::Union(union) => {
                let arms = union.arms.iter_mut().filter_map(|arm| arm.field.as_mut());
                [&mut union.switch].into_iter().chain(arms).chain(union.default.iter_mut().flatten()).collect()
            }
        }
    }

    /// Types of the fields of a structure, of the discriminant and arms of a union, or of a typedef.
    pub(crate) fn types(&self) -> Vec<&Type> {
        match self {
            Self::Enum(_) => Vec::new(),
            Self::Alias(ty) => vec![ty],
            Self::Struct { fields, .. } => fields.iter().map(|field| &field.ty).collect(),
            Self::Union(union) => {
                let arms = union.arms.iter().filter_map(|arm| arm.field.as_ref());
                [&union.switch]
                    .into_iter()
                    .chain(arms)
                    .chain(union.default.iter().flatten())
                    .map(|field| &field.ty)
                    .collect()
            }
        }
    }

    /// Mutable references to the types that [`types`](Self::types) returns.
    pub(crate) fn types_mut(&mut self) -> Vec<&mut Type> {
        match self {
            Self::Alias(ty) => vec![ty],
            form => form.fields_mut().into_iter().map(|field| &mut field.ty).collect(),
        }
    }

    /// Types that this form boxes.
    pub(crate) fn recursive(&self) -> Vec<TypeId> {
        self.types().into_iter().filter_map(Type::recursive).collect()
    }

    /// Named types that this form contains, without those inside themselves.
    pub(crate) fn contained(&self) -> impl Iterator<Item = TypeId> {
        self.types().into_iter().filter_map(Type::named)
    }
}

impl Type {
    /// The named type that this type is or holds.
    pub(crate) fn named(&self) -> Option<TypeId> {
        match self {
            Self::Named(id) | Self::List(id) => Some(*id),
            Self::FixedArray(inner, _) | Self::Array(inner, _) | Self::Optional(inner) => inner.named(),
            _ => None,
        }
    }

    /// The innermost type of arrays and pointers, if it has a name.
    fn named_mut(&mut self) -> Option<&mut Self> {
        match self {
            Self::Named(_) | Self::List(_) => Some(self),
            Self::FixedArray(inner, _) | Self::Array(inner, _) | Self::Optional(inner) => inner.named_mut(),
            _ => None,
        }
    }

    /// The type that this type boxes.
    pub(crate) fn recursive(&self) -> Option<TypeId> {
        match self {
            Self::Recursive(id) => Some(*id),
            Self::FixedArray(inner, _) | Self::Array(inner, _) | Self::Optional(inner) => inner.recursive(),
            _ => None,
        }
    }

    /// The type of the elements of arrays of fixed length, or the type itself.
    fn elements(&self) -> &Self {
        match self {
            Self::FixedArray(inner, count) if *count > 0 => inner.elements(),
            ty => ty,
        }
    }
}
