//! Resolution of names to types and values.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::ops::Range;

use crate::ast::{self, Base, Body, Declaration, Definition, Shape, TypeBody, Value};
use crate::errors::Problems;
use crate::preprocessor::{Preprocessor, defined_by_option};
use crate::schema::{
    Arm, Case, Constant, Field, Form, Name, Placement, Procedure, Program, Schema, Type, TypeDef, TypeId, Union,
    Version,
};

/// Highest number of a procedure: `rpcrdma::service::MAX_PROCEDURE`.
const MAX_PROCEDURE: u32 = 1023;

/// Types of C headers and Sun's RPC library, unless a file defines them.
fn c_type(name: &str) -> Option<Type> {
    Some(match name {
        "bool_t" => Type::Bool,
        "int8_t" | "int16_t" | "int32_t" | "int8" | "int16" | "int32" | "enum_t" => Type::Int,
        "u_char" | "u_short" | "u_int" | "u_long" | "u_int8_t" | "u_int16_t" | "u_int32_t" | "uint8_t" | "uint16_t"
        | "uint32_t" | "uint8" | "uint16" | "uint32" | "uchar_t" | "ushort_t" | "uint_t" | "ulong_t" | "rpcprog_t"
        | "rpcvers_t" | "rpcproc_t" | "rpcprot_t" | "rpcport_t" => Type::UnsignedInt,
        "int64_t" | "int64" | "quad_t" | "longlong_t" => Type::Hyper,
        "u_int64_t" | "uint64_t" | "uint64" | "u_quad_t" | "u_longlong_t" => Type::UnsignedHyper,
        "des_block" => Type::FixedOpaque(8),
        _ => return None,
    })
}

/// Constants that need no definition.
fn c_value(name: &str) -> Option<i128> {
    Some(match name {
        "FALSE" => 0,
        "TRUE" => 1,
        "MAXNETNAMELEN" => 255,
        // Flavors of authentication (RFC 5531 §8.1), and their names in C.
        "AUTH_NONE" | "AUTH_NULL" => 0,
        "AUTH_SYS" | "AUTH_UNIX" => 1,
        "AUTH_SHORT" => 2,
        "AUTH_DH" | "AUTH_DES" => 3,
        "RPCSEC_GSS" => 6,
        _ => return None,
    })
}

/// Resolves all names.
pub(crate) fn resolve<'p>(
    definitions: Vec<Definition>,
    preprocessor: Preprocessor<'p>,
    problems: &'p mut Problems,
) -> Schema {
    let hidden = preprocessor.hidden.into_iter().map(|(name, value)| (name.to_owned(), Some(value))).collect();
    let mut resolver = Resolver { names: HashMap::new(), hidden, options: preprocessor.options, problems };
    definitions.iter().for_each(|definition| resolver.declare_ahead(definition));
    let mut schema = Schema::default();
    let mut constants: Vec<_> = preprocessor.constants.into_values().flatten().collect();
    constants.sort_by_key(|constant| constant.name.at.start);
    for constant in constants {
        resolver.declare(&constant.name, Meaning::Value(constant.value));
        schema.constants.push(constant);
    }
    let (same_names, definitions): (Vec<_>, Vec<_>) = definitions.into_iter().partition(is_same_name);
    let (mut types, mut enums) = (0, Vec::new());
    for definition in &definitions {
        match &definition.body {
            Body::Constant(value) => {
                let text = if value.is_none() { Meaning::Text } else { Meaning::Invalid };
                let value = value.as_ref().and_then(|value| resolver.value(value));
                resolver.declare(&definition.name, value.map_or(text, Meaning::Value));
                if let Some(value) = value {
                    schema.constants.push(Constant { name: definition.name.clone(), value });
                }
            }
            Body::Type(_) | Body::Typedef(_) => {
                resolver.declare(&definition.name, Meaning::Type(TypeId(types)));
                types += 1;
            }
            Body::Program(..) => {}
        }
        if let Body::Type(TypeBody::Enum(members)) = &definition.body {
            enums.push(resolver.members(members));
        }
    }
    // Such a typedef is valid only if the name has another definition.
    same_names.iter().for_each(|definition| _ = resolver.named(&definition.name));
    let mut enums = enums.into_iter();
    schema.constants.sort_by_key(|constant| constant.name.at.start);
    for definition in &definitions {
        let form = match &definition.body {
            Body::Constant(_) => continue,
            Body::Program(number, versions) => {
                schema.programs.push(resolver.program(definition, number, versions));
                continue;
            }
            Body::Type(TypeBody::Enum(_)) => Form::Enum(enums.next().unwrap_or_default()),
            Body::Type(TypeBody::Struct(fields)) => Form::Struct { fields: resolver.fields(fields), is_list: false },
            Body::Type(TypeBody::Union(union)) => Form::Union(resolver.union(union)),
            Body::Typedef(declaration) => Form::Alias(resolver.ty(declaration)),
        };
        schema.types.push(TypeDef { name: definition.name.clone(), form });
    }
    let programs = schema.programs.iter().map(|program| (program.number, &program.name));
    resolver.check_unique(programs, "program number");
    resolver.check_unique(schema.programs.iter().map(|program| (&program.name.text, &program.name)), "program name");
    if !resolver.problems.is_empty() {
        return schema;
    }
    for def in &schema.types {
        if let Form::Union(union) = &def.form {
            resolver.check_cases(&schema, &def.name, union);
        }
    }
    schema
}

/// Whether a definition gives a type its own name, such as `typedef struct x x;`.
fn is_same_name(definition: &Definition) -> bool {
    matches!(&definition.body, Body::Typedef(Declaration { name, base: Base::Named(base), shape: Shape::Single, .. })
        if base.text == name.text)
}

#[derive(Clone, Copy)]
enum Meaning {
    Value(i128),
    Type(TypeId),
    Text,
    /// The error of its definition was reported.
    Invalid,
}

struct Resolver<'p> {
    names: HashMap<String, (Range<usize>, Meaning)>,
    /// Values of names that are not constants of the schema. `None` if a name has several values.
    hidden: HashMap<String, Option<i128>>,
    /// Options that define a name.
    options: HashMap<&'p str, &'p str>,
    problems: &'p mut Problems,
}

impl Resolver<'_> {
    fn declare(&mut self, name: &Name, meaning: Meaning) {
        if let Some(option) = self.options.get(&*name.text) {
            self.problems.add(&name.at, defined_by_option(&name.text, option));
        } else if let Some((first, _)) = self.names.get(&name.text) {
            self.problems.add(&name.at, format!("`{}` is defined twice", name.text)).related(first, "first here");
        } else {
            self.names.insert(name.text.clone(), (name.at.clone(), meaning));
        }
    }

    /// Reports names whose key is used twice.
    fn check_unique<'n, K: Eq + Hash>(&mut self, items: impl Iterator<Item = (K, &'n Name)>, what: &str) {
        let mut seen: HashMap<K, &Name> = HashMap::new();
        for (key, name) in items {
            match seen.get(&key) {
                Some(first) => {
                    let message = format!("`{}`: the {what} is used twice", name.text);
                    self.problems.add(&name.at, message).related(&first.at, "first here");
                }
                None => drop(seen.insert(key, name)),
            }
        }
    }

    fn value(&mut self, value: &Value) -> Option<i128> {
        let name = match value {
            Value::Number(number, _) => return Some(*number),
            Value::Named(name) => name,
        };
        let message = match self.names.get(&name.text) {
            Some((_, Meaning::Value(value))) => return Some(*value),
            Some((_, Meaning::Invalid)) => return None,
            Some((_, Meaning::Text)) => format!("`{}` is a string, not a number", name.text),
            Some((_, Meaning::Type(_))) => format!("`{}` is a type, not a constant", name.text),
            None => {
                let hidden = self.hidden.get(&name.text).copied().flatten();
                match hidden.or_else(|| c_value(&name.text)) {
                    Some(value) => return Some(value),
                    None => format!("unknown constant `{}`", name.text),
                }
            }
        };
        self.problems.add(&name.at, message);
        None
    }

    /// Records numbers by name. Constants may be used before their definition, and names of procedures are values (RFC
    /// 1833 §2.1).
    fn declare_ahead(&mut self, Definition { name, body, .. }: &Definition) {
        let mut declare = |name: &Name, value: Option<&Value>| {
            if let Some(Value::Number(number, _)) = value {
                let known = self.hidden.entry(name.text.clone()).or_insert(Some(*number));
                // Procedures of two versions may have the same name and different numbers.
                *known = known.filter(|known| known == number);
            }
        };
        match body {
            Body::Constant(value) => declare(name, value.as_ref()),
            Body::Type(TypeBody::Enum(members)) => {
                members.iter().for_each(|member| declare(&member.name, member.value.as_ref()));
            }
            Body::Program(_, versions) => {
                let procedures = versions.iter().flat_map(|version| &version.procedures);
                procedures.for_each(|procedure| declare(&procedure.name, Some(&procedure.number)));
            }
            _ => {}
        }
    }

    /// The value as a number of 32 bits, such as a length.
    fn number(&mut self, value: &Value, what: &str) -> u32 {
        let Some(number) = self.value(value) else { return 0 };
        u32::try_from(number).unwrap_or_else(|_| {
            let name = value.name();
            let shown = if name.text == number.to_string() { String::new() } else { format!(" ({number})") };
            self.problems.add(&name.at, format!("{what} `{}`{shown} is not in 0..=4294967295", name.text));
            0
        })
    }

    /// Declares the values of an enum.
    fn members(&mut self, members: &[ast::Member]) -> Vec<Constant> {
        let mut next = Some(0);
        let mut constants = Vec::new();
        for ast::Member { name, value: written } in members {
            let value = written.as_ref().map_or(next, |value| self.value(value));
            if value.is_some_and(|value| i32::try_from(value).is_err()) {
                let at = written.as_ref().map_or(&name.at, |value| &value.name().at);
                self.problems.add(at, format!("value of `{}` is not in -2147483648..=2147483647", name.text));
            }
            self.declare(name, value.map_or(Meaning::Invalid, Meaning::Value));
            constants.push(Constant { name: name.clone(), value: value.unwrap_or(0) });
            next = value.and_then(|value| value.checked_add(1));
        }
        constants
    }

    fn fields(&mut self, declarations: &[Declaration]) -> Vec<Field> {
        let fields: Vec<_> = declarations.iter().map(|declaration| self.field(declaration)).collect();
        self.check_unique(fields.iter().map(|field| (&field.name.text, &field.name)), "field name");
        fields
    }

    fn field(&mut self, declaration: &Declaration) -> Field {
        Field { name: declaration.name.clone(), ty: self.ty(declaration) }
    }

    fn union(&mut self, union: &ast::Union) -> Union {
        let mut result = Union { switch: self.field(&union.switch), arms: Vec::new(), default: None };
        for arm in &union.arms {
            let field = arm.field.as_ref().map(|field| self.field(field));
            let mut cases = Vec::new();
            for case in &arm.cases {
                match case {
                    Some(value) => {
                        let number = self.value(value).unwrap_or(0);
                        cases.push(Case { name: value.name().clone(), value: number });
                    }
                    None if result.default.is_some() => {
                        let name = &union.switch.name;
                        self.problems.add(&name.at, format!("the union on `{}` has two default arms", name.text));
                    }
                    None => result.default = Some(field.clone()),
                }
            }
            if !cases.is_empty() {
                result.arms.push(Arm { cases, field });
            }
        }
        let fields = union.arms.iter().filter_map(|arm| arm.field.as_ref());
        self.check_unique(fields.map(|field| (&field.name.text, &field.name)), "arm name");
        result
    }

    /// Checks the type of the discriminant, and that each case is a value of it and is used once.
    fn check_cases(&mut self, schema: &Schema, name: &Name, union: &Union) {
        let Field { name: switch, ty } = &union.switch;
        let ty = schema.resolve(ty);
        let form = ty.named().map(|id| &schema.types[id.0].form);
        let values: HashSet<i128> = match form {
            Some(Form::Enum(values)) => values.iter().map(|value| value.value).collect(),
            _ => HashSet::new(),
        };
        let fits = |value| match ty {
            Type::Int => i32::try_from(value).is_ok(),
            Type::UnsignedInt => u32::try_from(value).is_ok(),
            Type::Bool => matches!(value, 0 | 1),
            _ => values.contains(&value),
        };
        if values.is_empty() && !matches!(ty, Type::Int | Type::UnsignedInt | Type::Bool) {
            let message = format!("union `{}` cannot switch on `{}`", name.text, switch.text);
            self.problems.add(&switch.at, message).help("a discriminant is an int, unsigned int, bool or enum");
            return;
        }
        let mut seen: HashMap<i128, &Name> = HashMap::new();
        for Case { name: case, value } in union.arms.iter().flat_map(|arm| &arm.cases) {
            if !fits(*value) {
                self.problems.add(&case.at, format!("`{}` is not a value of `{}`", case.text, switch.text));
            } else if let Some(first) = seen.insert(*value, case) {
                let message = format!("case `{}` is used twice", case.text);
                self.problems.add(&case.at, message).related(&first.at, "first here");
            }
        }
        if union.arms.is_empty() {
            self.problems.add(&name.at, format!("union `{}` has no case", name.text));
        }
    }

    /// The type of a declaration. After an error, the type has no meaning.
    fn ty(&mut self, declaration: &Declaration) -> Type {
        let base = match &declaration.base {
            Base::Builtin(ty) => ty.clone(),
            Base::Named(name) => self.named(name),
            base @ (Base::Opaque | Base::ZeroCopyOpaque) => {
                return match &declaration.shape {
                    Shape::Fixed(len) => Type::FixedOpaque(self.number(len, "length")),
                    shape => Type::Opaque { max: self.max(shape), is_bulk: matches!(base, Base::ZeroCopyOpaque) },
                };
            }
            Base::Text => return Type::Text { max: self.max(&declaration.shape), is_bulk: false },
            // `hoist` has replaced all anonymous types.
            Base::Inline(_) => Type::Void,
        };
        match &declaration.shape {
            Shape::Single => base,
            Shape::Fixed(len) => Type::FixedArray(Box::new(base), self.number(len, "length")),
            shape @ Shape::Variable(_) => Type::Array(Box::new(base), self.max(shape)),
            Shape::Pointer => Type::Optional(Box::new(base)),
        }
    }

    fn max(&mut self, shape: &Shape) -> Option<u32> {
        match shape {
            Shape::Variable(Some(max)) => Some(self.number(max, "bound")),
            _ => None,
        }
    }

    fn named(&mut self, name: &Name) -> Type {
        let message = match self.names.get(&name.text) {
            Some((_, Meaning::Type(id))) => return Type::Named(*id),
            Some(_) => format!("`{}` is a constant, not a type", name.text),
            None => match c_type(&name.text) {
                Some(ty) => return ty,
                None => format!("unknown type `{}`", name.text),
            },
        };
        self.problems.add(&name.at, message);
        Type::Void
    }

    fn program(&mut self, definition: &Definition, number: &Value, versions: &[ast::Version]) -> Program {
        let versions: Vec<_> = versions.iter().map(|version| self.version(version)).collect();
        self.check_unique(versions.iter().map(|version| (version.number, &version.name)), "version number");
        self.check_unique(versions.iter().map(|version| (&version.name.text, &version.name)), "version name");
        let number = self.number(number, "program number");
        Program { name: definition.name.clone(), number, versions }
    }

    fn version(&mut self, version: &ast::Version) -> Version {
        let mut procedures = Vec::new();
        for procedure in &version.procedures {
            let number = self.number(&procedure.number, "procedure number");
            if number > MAX_PROCEDURE {
                let message = format!("procedure number {number} exceeds {MAX_PROCEDURE}, the engine's limit");
                self.problems.add(&procedure.number.name().at, message);
            }
            procedures.push(Procedure {
                name: procedure.name.clone(),
                number,
                arguments: procedure.arguments.iter().map(|argument| self.ty(argument)).collect(),
                results: procedure.results.as_ref().map_or(Type::Void, |results| self.ty(results)),
                placement: Placement::default(),
            });
        }
        self.check_unique(procedures.iter().map(|procedure| (procedure.number, &procedure.name)), "procedure number");
        self.check_unique(procedures.iter().map(|procedure| (&procedure.name.text, &procedure.name)), "procedure name");
        let number = self.number(&version.number, "version number");
        Version { name: version.name.clone(), number, procedures }
    }
}
