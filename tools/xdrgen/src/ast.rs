//! Syntax tree of a specification. Names are not resolved.

use crate::schema::{Name, Type};

/// A definition.
#[derive(Clone, Debug)]
pub(crate) struct Definition {
    pub(crate) name: Name,
    pub(crate) body: Body,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// `const`; `None` for a string.
    Constant(Option<Value>),
    Type(TypeBody),
    Typedef(Declaration),
    Program(Value, Vec<Version>),
}

/// Content of the braces of a type.
#[derive(Clone, Debug)]
pub(crate) enum TypeBody {
    Enum(Vec<Member>),
    Struct(Vec<Declaration>),
    Union(Union),
}

/// A value of an enum. Without a number, it is one more than the value before it.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) name: Name,
    pub(crate) value: Option<Value>,
}

#[derive(Clone, Debug)]
pub(crate) struct Union {
    pub(crate) switch: Box<Declaration>,
    pub(crate) arms: Vec<Arm>,
}

#[derive(Clone, Debug)]
pub(crate) struct Arm {
    /// Cases; `None` is `default`.
    pub(crate) cases: Vec<Option<Value>>,
    /// `None` for `void`.
    pub(crate) field: Option<Declaration>,
}

/// A number, or the name of a number.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Number(i128, Name),
    Named(Name),
}

/// A field, arm, argument or typedef.
#[derive(Clone, Debug)]
pub(crate) struct Declaration {
    /// Empty for arguments and results.
    pub(crate) name: Name,
    pub(crate) base: Base,
    pub(crate) shape: Shape,
}

/// The type before the name.
#[derive(Clone, Debug)]
pub(crate) enum Base {
    Builtin(Type),
    Opaque,
    /// `zcopaque` of libevpl: opaque data that may travel in a chunk.
    ZeroCopyOpaque,
    Text,
    Named(Name),
    /// An anonymous type.
    Inline(TypeBody),
}

/// Array, pointer or single value, as written around the name.
#[derive(Clone, Debug)]
pub(crate) enum Shape {
    Single,
    Fixed(Value),
    Variable(Option<Value>),
    Pointer,
}

#[derive(Clone, Debug)]
pub(crate) struct Version {
    pub(crate) name: Name,
    pub(crate) number: Value,
    pub(crate) procedures: Vec<Procedure>,
}

#[derive(Clone, Debug)]
pub(crate) struct Procedure {
    pub(crate) name: Name,
    pub(crate) number: Value,
    /// Empty for `void`.
    pub(crate) arguments: Vec<Declaration>,
    /// `None` for `void`.
    pub(crate) results: Option<Declaration>,
}

impl Value {
    /// The number or name as written, with its position.
    pub(crate) fn name(&self) -> &Name {
        match self {
            Self::Number(_, name) | Self::Named(name) => name,
        }
    }
}
