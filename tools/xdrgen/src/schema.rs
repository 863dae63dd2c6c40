//! A checked specification, with resolved names, values of constants, and limits of procedures.

use std::ops::Range;
use std::path::PathBuf;

/// All definitions of a file, in its order.
#[derive(Clone, Debug, Default)]
pub struct Schema {
    /// Constants. Values of enums are in their types only.
    pub constants: Vec<Constant>,
    /// Types. Anonymous types come before the type that holds them.
    pub types: Vec<TypeDef>,
    /// Programs.
    pub programs: Vec<Program>,
    /// Warnings, one line each, such as about a dropped `#include`.
    pub warnings: Vec<String>,
    /// Paths of the included files. Their definitions are a part of the schema.
    pub included: Vec<PathBuf>,
}

/// Index of a type in [`Schema::types`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TypeId(pub usize);

/// A name as written in the file, with the comment of its item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// Text of the name.
    pub text: String,
    /// Position of the name in the file, in bytes.
    pub at: Range<usize>,
    /// Lines of the comment before the item or after it. Only the name in a definition has them.
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
    /// Name. For an anonymous type, it consists of the names of its owner and field.
    pub name: Name,
    /// Form.
    pub form: Form,
}

/// Form of a named type.
#[derive(Clone, Debug)]
pub enum Form {
    /// `enum`, with its values.
    Enum(Vec<Constant>),
    /// `struct`. If its last field is `name *next`, `fields` does not have it, and `is_list` is set.
    Struct {
        /// Fields.
        fields: Vec<Field>,
        /// Whether the structure is an element of a list by optional pointers.
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
    /// The default arm, if any. The inner `Option` is `None` for `void`.
    pub default: Option<Option<Field>>,
}

/// An arm of a union.
#[derive(Clone, Debug)]
pub struct Arm {
    /// Cases of the arm.
    pub cases: Vec<Case>,
    /// Field of the arm; `None` for `void`.
    pub field: Option<Field>,
}

/// A case of a union.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name of the constant, or the number.
    pub name: Name,
    /// Value of the case.
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
    /// `void`, which only results of a procedure may be.
    Void,
    /// `opaque x[n]`
    FixedOpaque(u32),
    /// `opaque x<max>`
    Opaque {
        /// Maximum bytes.
        max: Option<u32>,
        /// It may travel as a chunk.
        is_bulk: bool,
    },
    /// `string x<max>`
    Text {
        /// Maximum bytes.
        max: Option<u32>,
        /// It may travel as a chunk.
        is_bulk: bool,
    },
    /// `T x[n]`
    FixedArray(Box<Type>, u32),
    /// `T x<max>`
    Array(Box<Type>, Option<u32>),
    /// `T *x`, where `T` is not a list.
    Optional(Box<Type>),
    /// `T *x`, where `T` is a list by optional pointers.
    List(TypeId),
    /// A named type.
    Named(TypeId),
    /// A named type inside a value of the same type, except for the next element of a list.
    Recursive(TypeId),
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
    /// Types of the arguments; empty for `void`.
    pub arguments: Vec<Type>,
    /// Type of the results.
    pub results: Type,
    /// Placement and limits.
    pub placement: Placement,
}

/// Placement and limits of a procedure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// DDP-eligible arguments.
    pub arguments: Option<Eligible>,
    /// DDP-eligible results.
    pub results: Option<Eligible>,
    /// Limit of the bytes of eligible results in a reply without Write chunk. Each reply buffer has room for them.
    pub max_inline_result: Option<u32>,
    /// Limit of the bytes of arguments without eligible items.
    pub max_call: u32,
    /// Limit of the bytes of results without eligible items.
    pub max_reply: u32,
    /// Limit of the bytes of results before the first eligible item.
    pub head: u32,
    /// The duplicate request cache keeps retransmitted calls from running again.
    pub cached: bool,
    /// Calls have no reply.
    pub one_way: bool,
    /// Where and how the procedure runs.
    pub run: Run,
}

/// DDP-eligible items of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eligible {
    /// Limit of the items in one message.
    pub count: u32,
    /// Limit of the bytes of an item.
    pub max_len: u32,
}

/// Where and how a procedure runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Run {
    /// Runs on the shard, and answers when it returns.
    #[default]
    Shard,
    /// Runs on a worker, and answers when it returns.
    Workers,
    /// Receives its call on the shard, and answers later.
    Deferred,
    /// Is a future on the shard.
    Async,
}
