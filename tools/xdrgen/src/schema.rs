//! A checked specification: names are resolved, constants have values, sizes are known.

use std::ops::Range;
use std::path::PathBuf;

/// All definitions of a file, in its order.
#[derive(Clone, Debug, Default)]
pub struct Schema {
    /// Constants. Values of enums are in their types only.
    pub constants: Vec<Constant>,
    /// Types. Nested anonymous types are types of their own, in front of the one that holds them.
    pub types: Vec<TypeDef>,
    /// Programs.
    pub programs: Vec<Program>,
    /// Warnings, one line each, such as of a dropped `#include`.
    pub warnings: Vec<String>,
    /// Paths of the files that the specification includes. What they define is a part of it.
    pub included: Vec<PathBuf>,
}

/// Index of a type in [`Schema::types`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TypeId(pub usize);

/// A name as the file has it, and the comment of its item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// Its text.
    pub text: String,
    /// Bytes of the file that it is.
    pub at: Range<usize>,
    /// Lines of the comment in front or behind. Only a name that defines has them.
    pub doc: Vec<String>,
}

impl Name {
    pub(crate) fn new(text: impl Into<String>, at: Range<usize>) -> Self {
        Self { text: text.into(), at, doc: Vec::new() }
    }
}

/// `const name = value;`
#[derive(Clone, Debug)]
pub struct Constant {
    /// Name.
    pub name: Name,
    /// Value.
    pub value: i128,
}

/// A named type.
#[derive(Clone, Debug)]
pub struct TypeDef {
    /// Name; of an anonymous type, made of the names of its owner and field.
    pub name: Name,
    /// Form.
    pub form: Form,
}

/// Form of a named type.
#[derive(Clone, Debug)]
pub enum Form {
    /// `enum`: its values.
    Enum(Vec<Constant>),
    /// `struct`. If its last field was `name *next`, that field is gone, and `is_list` is set.
    Struct {
        /// Fields.
        fields: Vec<Field>,
        /// Elements of a list by optional pointers.
        is_list: bool,
    },
    /// `union`.
    Union(Union),
    /// `typedef`.
    Alias(Type),
}

/// A discriminated union.
#[derive(Clone, Debug)]
pub struct Union {
    /// The discriminant: an integer, a bool or an enum.
    pub switch: Field,
    /// Arms with cases.
    pub arms: Vec<Arm>,
    /// The default arm, if any; inner `None` for `void`.
    pub default: Option<Option<Field>>,
}

/// An arm of a union.
#[derive(Clone, Debug)]
pub struct Arm {
    /// Its cases.
    pub cases: Vec<Case>,
    /// `None` for `void`.
    pub field: Option<Field>,
}

/// A case of a union.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name of the constant, or the number.
    pub name: Name,
    /// Its value.
    pub value: i128,
}

/// A field, arm or argument.
#[derive(Clone, Debug)]
pub struct Field {
    /// Name; empty for an argument of a procedure.
    pub name: Name,
    /// Type.
    pub ty: Type,
}

/// Type of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// `int`
    Int,
    /// `unsigned int`
    UnsignedInt,
    /// `hyper`
    Hyper,
    /// `unsigned hyper`
    UnsignedHyper,
    /// `float`
    Float,
    /// `double`
    Double,
    /// `bool`
    Bool,
    /// `void`, only as results of a procedure.
    Void,
    /// `opaque x[n]`
    FixedOpaque(u32),
    /// `opaque x<max>`
    Opaque {
        /// Most bytes.
        max: Option<u32>,
        /// It may travel as a chunk.
        is_bulk: bool,
    },
    /// `string x<max>`
    Text {
        /// Most bytes.
        max: Option<u32>,
        /// It may travel as a chunk.
        is_bulk: bool,
    },
    /// `T x[n]`
    FixedArray(Box<Type>, u32),
    /// `T x<max>`
    Array(Box<Type>, Option<u32>),
    /// `T *x`, where `T` is no list.
    Optional(Box<Type>),
    /// `T *x`, where `T` is a list by optional pointers.
    List(TypeId),
    /// A named type.
    Named(TypeId),
    /// A named type inside a value of the same type, other than the next element of a list.
    Boxed(TypeId),
}

/// `program`
#[derive(Clone, Debug)]
pub struct Program {
    /// Name.
    pub name: Name,
    /// Number.
    pub number: u32,
    /// Versions.
    pub versions: Vec<Version>,
}

/// `version`
#[derive(Clone, Debug)]
pub struct Version {
    /// Name.
    pub name: Name,
    /// Number.
    pub number: u32,
    /// Procedures.
    pub procedures: Vec<Procedure>,
}

/// A procedure.
#[derive(Clone, Debug)]
pub struct Procedure {
    /// Name.
    pub name: Name,
    /// Number.
    pub number: u32,
    /// Types of its arguments; none for `void`.
    pub arguments: Vec<Type>,
    /// Type of its results.
    pub results: Type,
    /// What the placement file says of it.
    pub placement: Placement,
}

/// Placement and limits of a procedure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// DDP-eligible arguments, and most bytes of each.
    pub arguments: Option<Eligible>,
    /// DDP-eligible results, and most bytes of each.
    pub results: Option<Eligible>,
    /// Most bytes of eligible results in a reply without Write chunk. Each reply buffer has room for them.
    pub max_inline_result: Option<u32>,
    /// Most bytes of arguments, eligible ones left out.
    pub max_call: u32,
    /// Most bytes of results, eligible ones left out.
    pub max_reply: u32,
    /// Bytes of results in front of the first eligible one, at most.
    pub head: u32,
    /// Calls run once, by the duplicate request cache.
    pub cached: bool,
    /// Calls have no reply.
    pub one_way: bool,
    /// Where and how it runs.
    pub run: Run,
}

/// DDP-eligible items of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eligible {
    /// Number of items in one message, at most.
    pub count: u32,
    /// Most bytes of each.
    pub max_len: u32,
}

/// Where and how a procedure runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Run {
    /// On the shard, and answers when it returns.
    #[default]
    Shard,
    /// On a worker, and answers when it returns.
    Workers,
    /// Takes its call on the shard, and answers later.
    Deferred,
    /// A future on the shard.
    Async,
}
