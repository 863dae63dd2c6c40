//! Lists by optional pointers, and the end of all other recursion.

use std::ops::Range;

use crate::errors::Problems;
use crate::schema::{Field, Form, Schema, Type, TypeId};

/// Most types inside each other, by name.
const MAX_DEPTH: usize = 64;

impl Schema {
    /// The type that a typedef, or one of a typedef, stands for.
    #[must_use]
    pub fn resolve<'s>(&'s self, mut ty: &'s Type) -> &'s Type {
        // A circle of typedefs has an end here.
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
    for i in 0..schema.types.len() {
        let Form::Struct { fields, .. } = &schema.types[i].form else { continue };
        let Some(last) = fields.last() else { continue };
        let Type::Optional(next) = schema.resolve(&last.ty) else { continue };
        if **next == Type::Named(TypeId(i))
            && let Form::Struct { fields, is_list } = &mut schema.types[i].form
        {
            fields.pop();
            *is_list = true;
        }
    }
    let lists: Vec<bool> = (0..schema.types.len()).map(|i| schema.is_list(TypeId(i))).collect();
    let names: Vec<String> = schema.types.iter().map(|def| def.name.text.clone()).collect();
    each_type(schema, &mut |ty, at| {
        if let Some(id) = make_lists(ty, &lists) {
            let message = format!("`{}` is an element of a list, not a type of one value", names[id.0]);
            problems.add(at, message).help(format!("a pointer is the list: `{} *`", names[id.0]));
        }
    });
}

/// Replaces pointers to elements by lists. Returns an element without pointer.
fn make_lists(ty: &mut Type, lists: &[bool]) -> Option<TypeId> {
    match ty {
        Type::Named(id) => lists[id.0].then_some(*id),
        Type::Optional(inner) => {
            let id = make_lists(inner, lists)?;
            if matches!(**inner, Type::Named(_)) {
                *ty = Type::List(id);
                return None;
            }
            Some(id)
        }
        Type::FixedArray(inner, _) | Type::Array(inner, _) => make_lists(inner, lists),
        _ => None,
    }
}

/// Calls `f` for each written type, with a place of its name.
fn each_type(schema: &mut Schema, f: &mut impl FnMut(&mut Type, &Range<usize>)) {
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

/// Reports types that contain themselves, or too many others inside each other.
pub(crate) fn check(schema: &Schema, problems: &mut Problems) {
    let mut check = Check { schema, problems, heights: vec![State::New; schema.types.len()] };
    for i in 0..schema.types.len() {
        check.visit(TypeId(i), 0);
    }
}

#[derive(Clone, Copy)]
enum State {
    New,
    /// What it contains is being visited.
    Open,
    /// Types inside each other, itself included.
    Height(usize),
}

struct Check<'a> {
    schema: &'a Schema,
    problems: &'a mut Problems,
    heights: Vec<State>,
}

impl Check<'_> {
    /// The height of a type. `depth` types are around it.
    fn visit(&mut self, id: TypeId, depth: usize) -> usize {
        let def = &self.schema.types[id.0];
        match self.heights[id.0] {
            State::Height(height) => return height,
            State::Open => {
                let help = "recursion is supported as a list only: `NAME *next;` as the last field of `struct NAME`";
                self.problems.add(&def.name.at, format!("`{}` contains itself", def.name.text)).help(help);
                // Reported once.
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
                .add(&def.name.at, format!("`{}` has more than {MAX_DEPTH} types inside each other", def.name.text));
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
                [&union.switch].into_iter().chain(arms).chain(union.default.iter().flatten()).map(|of| &of.ty).collect()
            }
        }
    }

    /// The named types that a type contains.
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
}
