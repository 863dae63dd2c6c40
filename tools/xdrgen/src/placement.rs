//! Placement files, which have eligible items, bounds, and how procedures run.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use crate::Source;
use crate::errors::Problems;
use crate::schema::{Eligible, Form, Placement, Procedure, Run, Schema, Type, TypeId};
use crate::sizes::{Size, Sizes, UNBOUNDED};

/// Limit of eligible items in a message: `rpcrdma::service::MAX_CHUNKS`.
const MAX_ITEMS: u64 = 4;
/// Limit of the bytes of a message without a bound, if there is no placement file.
const DEFAULT_MAX: u32 = 65536;

type Table<V> = BTreeMap<Spanned<String>, V>;
/// Entries of procedures, by the position of their version in the specification.
type Entries = BTreeMap<usize, Table<ProcedureEntry>>;

/// A bound in the file.
#[derive(Default, Deserialize)]
#[serde(untagged, expecting = "expected a number, or `{ from = the specification's bound, to = a smaller one }`")]
enum Bound {
    /// The specification has no bound.
    Missing(u32),
    /// The bound is smaller than that of the specification.
    Narrowed { from: u32, to: u32 },
    #[default]
    #[serde(skip)]
    Invalid,
}

/// Entry of a procedure in the file.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ProcedureEntry {
    max_call: Option<Spanned<u32>>,
    max_reply: Option<Spanned<u32>>,
    max_inline_result: Option<Spanned<u32>>,
    cached: Option<Spanned<bool>>,
    one_way: Option<Spanned<bool>>,
    run: Run,
}

/// Applies a placement file to a schema, and computes the limits of all procedures.
pub(crate) fn apply(schema: &mut Schema, file: Option<&Source>, problems: &mut Problems) {
    let (table, errors) = DeTable::parse_recoverable(file.map_or("", |file| file.text.as_str()));
    let mut reader = PlacementReader { problems, has_file: file.is_some(), eligible: Vec::new() };
    errors.iter().for_each(|error| reader.toml_error(error));
    if !errors.is_empty() {
        return;
    }
    let (mut bounds, mut eligible, mut entries) = (Table::default(), Vec::new(), Entries::default());
    for (key, value) in table.into_inner() {
        match &**key.get_ref() {
            "bounds" => bounds = reader.read(value),
            "eligible" => eligible = reader.read(value),
            name if is_program(schema, name) => {
                for (version, procedures) in reader.read::<Table<Table<ProcedureEntry>>>(value) {
                    let at = reader.find_version(schema, Some(name), version.get_ref(), &version.span());
                    reader.add(&mut entries, at, procedures);
                }
            }
            name => {
                if let Some(at) = reader.find_version(schema, None, name, &key.span()) {
                    let procedures = reader.read(value);
                    reader.add(&mut entries, Some(at), procedures);
                }
            }
        }
    }
    // After errors, missing limits are not reported, because unread entries may have them.
    reader.has_file &= reader.problems.is_empty();
    reader.apply_bounds(schema, bounds);
    reader.mark_eligible(schema, eligible);
    reader.compute_placements(schema, entries);
}

/// Applies the parts of a placement file, and collects errors.
struct PlacementReader<'p> {
    problems: &'p mut Problems,
    has_file: bool,
    /// Keys of eligible items, the types that hold them, and the positions of the keys.
    eligible: Vec<(String, TypeId, Range<usize>)>,
}

impl PlacementReader<'_> {
    fn report(&mut self, at: &Range<usize>, message: impl Into<String>) {
        self.problems.add_placement(at, message);
    }

    fn toml_error(&mut self, error: &toml::de::Error) {
        self.report(&error.span().unwrap_or(0..0), error.message());
    }

    fn read<T: Default + DeserializeOwned>(&mut self, value: Spanned<DeValue<'_>>) -> T {
        T::deserialize(ValueDeserializer::from(value)).unwrap_or_else(|error| {
            self.toml_error(&error);
            T::default()
        })
    }

    /// Position of a version in the specification: of this program, or else of the only version with this name.
    fn find_version(&mut self, schema: &Schema, program: Option<&str>, name: &str, at: &Range<usize>) -> Option<usize> {
        let programs = schema.programs.iter().filter(|known| program.is_none_or(|program| known.name.text == program));
        let versions = programs.flat_map(|program| program.versions.iter().map(move |version| (program, version)));
        let found: Vec<_> = versions.filter(|(_, version)| version.name.text == name).collect();
        match (&found[..], program) {
            ([(_, version)], _) => return Some(version.name.at.start),
            ([], Some(program)) => self.report(at, format!("program `{program}` has no version `{name}`")),
            ([], None) => {
                self.report(at, format!("unknown key `{name}`: expected `eligible`, `bounds`, a version or a program"));
            }
            (candidates, _) => {
                let names: Vec<_> =
                    candidates.iter().map(|(program, _)| format!("`{}.{name}`", program.name.text)).collect();
                self.report(at, format!("`{name}` is a version of several programs: write {}", names.join(" or ")));
            }
        }
        None
    }

    /// Adds the entries of a version. A procedure may have only one.
    fn add(&mut self, entries: &mut Entries, version: Option<usize>, procedures: Table<ProcedureEntry>) {
        let Some(version) = version else { return };
        let known = entries.entry(version).or_default();
        for (name, entry) in procedures {
            let (at, text) = (name.span(), name.get_ref().clone());
            if known.insert(name, entry).is_some() {
                self.report(&at, format!("`{text}` has two entries: by its version, and by its program and version"));
            }
        }
    }

    fn apply_bounds(&mut self, schema: &mut Schema, bounds: Table<Spanned<Bound>>) {
        let mut specified = schema.clone();
        let mut bounds: Vec<_> = bounds.into_iter().collect();
        // Typedefs come first, because their bounds limit those of fields.
        bounds.sort_by_key(|(key, _)| key.get_ref().contains('.'));
        for (key, bound) in bounds {
            let Some((_, mut ty)) = self.find_item(schema, key.get_ref(), &key.span()) else { continue };
            let key_text = key.get_ref();
            let (Type::Opaque { max, .. } | Type::Text { max, .. } | Type::Array(_, max)) = &mut ty else {
                self.report(&key.span(), format!("`{key_text}` is not an opaque, string or array of variable length"));
                continue;
            };
            let at = bound.span();
            let bound = match (self.bound_of(&mut specified, key_text), bound.into_inner()) {
                (_, Bound::Invalid) => continue,
                (None, Bound::Missing(bound)) => bound,
                (Some(max), Bound::Missing(bound)) if bound == max => bound,
                (Some(max), Bound::Missing(bound)) if bound > max => {
                    self.report(&at, format!("{bound} exceeds {max}, the specification's bound"));
                    continue;
                }
                (Some(max), Bound::Missing(bound)) => {
                    self.problems
                        .add_placement(&at, format!("`{key_text}` has the bound {max} in the specification"))
                        .help(format!(
                            "to accept less than the protocol allows, write `{{ from = {max}, to = {bound} }}`"
                        ));
                    continue;
                }
                (None, Bound::Narrowed { from, .. }) => {
                    self.report(&at, format!("`{key_text}` has no bound in the specification, not {from}"));
                    continue;
                }
                (Some(max), Bound::Narrowed { from, .. }) if from != max => {
                    self.report(&at, format!("`{key_text}` has the bound {max} in the specification, not {from}"));
                    continue;
                }
                (_, Bound::Narrowed { from, to }) if to >= from => {
                    self.report(&at, format!("{to} is not less than {from}, the specification's bound"));
                    continue;
                }
                (_, Bound::Narrowed { to, .. }) => to,
            };
            if let Some(max) = max.filter(|max| *max < bound) {
                self.report(&at, format!("{bound} exceeds {max}, the bound of its typedef"));
            }
            *max = Some(bound);
            set_item(schema, key_text, &ty);
        }
    }

    /// The specification's bound of an item of variable length.
    fn bound_of(&mut self, specified: &mut Schema, key: &str) -> Option<u32> {
        match self.find_item(specified, key, &(0..0))?.1 {
            Type::Opaque { max, .. } | Type::Text { max, .. } | Type::Array(_, max) => max,
            _ => None,
        }
    }

    fn mark_eligible(&mut self, schema: &mut Schema, keys: Vec<Spanned<String>>) {
        for key in keys {
            let (at, key) = (key.span(), key.into_inner());
            let Some((owner, mut ty)) = self.find_item(schema, &key, &at) else { continue };
            let (Type::Opaque { max, is_bulk } | Type::Text { max, is_bulk }) = &mut ty else {
                self.report(&at, format!("`{key}` is not an opaque or string of variable length"));
                continue;
            };
            if max.is_none() {
                self.report(&at, format!("`{key}` has no bound: give one in `[bounds]`"));
            }
            *is_bulk = true;
            set_item(schema, &key, &ty);
            self.eligible.push((key, owner, at));
        }
    }

    /// The type of a key's item, with typedefs resolved, and the type that holds the item.
    fn find_item(&mut self, schema: &mut Schema, key: &str, at: &Range<usize>) -> Option<(TypeId, Type)> {
        let (name, field) = split_key(key);
        let Some((owner, items)) = find_items(schema, key) else {
            self.report(at, format!("unknown type `{name}`"));
            return None;
        };
        let Some(ty) = items.first().map(|ty| (**ty).clone()) else {
            self.report(
                at,
                match field {
                    Some(field) => format!("`{name}` has no field `{field}`"),
                    None => format!("`{key}` is not a typedef: name a field as `{key}.field`"),
                },
            );
            return None;
        };
        if let (Some(_), Some(typedef)) = (field, ty.named().map(|id| &schema.types[id.0])) {
            let named = &typedef.name.text;
            if matches!(typedef.form, Form::Alias(_)) && is_variable(schema.resolve(&ty)) {
                self.problems
                    .add_placement(at, format!("`{key}` has the type `{named}`, which is one Rust type in all places"))
                    .help(format!("name the typedef, `{named}`"));
                return None;
            }
        }
        Some((owner, schema.resolve(&ty).clone()))
    }

    /// Computes the limits of all procedures.
    fn compute_placements(&mut self, schema: &mut Schema, mut versions: Entries) {
        let mut programs = std::mem::take(&mut schema.programs);
        self.keep_inline(schema);
        let mut sizes = Sizes::new(schema);
        for version in programs.iter_mut().flat_map(|program| &mut program.versions) {
            let mut entries = versions.remove(&version.name.at.start).unwrap_or_default();
            for procedure in &mut version.procedures {
                let entry = entries.remove(&Spanned::new(0..0, procedure.name.text.clone())).unwrap_or_default();
                procedure.placement = self.compute_placement(&mut sizes, procedure, &entry, &version.name.text);
            }
            for name in entries.keys() {
                let message = format!("`{}` has no procedure `{}`", version.name.text, name.get_ref());
                self.report(&name.span(), message);
            }
        }
        let inside = sizes.inside_repeated();
        for (key, _, at) in std::mem::take(&mut self.eligible).into_iter().filter(|(_, owner, _)| inside[owner.0]) {
            self.report(&at, format!("`{key}` cannot be eligible inside an array, list or optional data"));
        }
        schema.programs = programs;
    }

    /// Makes `zcopaque` inside an array, list, optional or recursive data ineligible.
    fn keep_inline(&mut self, schema: &mut Schema) {
        let listed: Vec<TypeId> = self.eligible.iter().map(|(_, owner, _)| *owner).collect();
        let mut sizes = Sizes::new(schema);
        (0..schema.types.len()).for_each(|id| drop(sizes.size_of(&Type::Named(TypeId(id)))));
        let inside = sizes.inside_repeated();
        for (id, def) in schema.types.iter_mut().enumerate().filter(|(id, _)| inside[*id]) {
            // Eligible items of the placement file stay, because they are reported as errors.
            if listed.contains(&TypeId(id)) {
                continue;
            }
            for ty in def.form.types_mut() {
                if let Type::Opaque { is_bulk, .. } = ty {
                    *is_bulk = false;
                }
            }
        }
    }

    /// Computes the placement of a procedure from its types and its entry.
    fn compute_placement(
        &mut self,
        sizes: &mut Sizes<'_>,
        procedure: &Procedure,
        entry: &ProcedureEntry,
        version: &str,
    ) -> Placement {
        let call = sizes.sequence(&procedure.arguments);
        let reply = sizes.size_of(&procedure.results);
        let results = self.items(&reply, procedure, "replies");
        if let Some(max) = &entry.max_inline_result {
            let eligible = results.map_or(0, |results| u64::from(results.count) * u64::from(results.max_len));
            if u64::from(*max.get_ref()) > eligible {
                self.report(&max.span(), format!("{} exceeds {eligible}, all eligible results", max.get_ref()));
            }
        }
        if let Some(cached) = entry.cached.as_ref().filter(|cached| *cached.get_ref() && results.is_some()) {
            self.report(&cached.span(), "a procedure with eligible results cannot be cached");
        }
        let one_way = entry.one_way.as_ref().filter(|one_way| *one_way.get_ref());
        let is_cached = entry.cached.as_ref().is_some_and(|cached| *cached.get_ref());
        if let Some(one_way) = one_way {
            let why = match &procedure.results {
                results if *results != Type::Void => Some("results"),
                _ if call.count > 0 => Some("eligible arguments"),
                _ if is_cached => Some("cached replies"),
                _ => None,
            };
            if let Some(what) = why {
                self.report(&one_way.span(), format!("a one-way procedure has no {what}"));
            }
        }
        Placement {
            one_way: one_way.is_some(),
            arguments: self.items(&call, procedure, "calls"),
            results,
            max_inline_result: entry.max_inline_result.as_ref().map(|max| *max.get_ref()),
            max_call: self.limit(["calls", "max_call"], entry.max_call.as_ref(), &call, procedure, version),
            max_reply: self.limit(["replies", "max_reply"], entry.max_reply.as_ref(), &reply, procedure, version),
            head: u32::try_from(reply.head).unwrap_or(u32::MAX),
            cached: is_cached,
            run: entry.run,
        }
    }

    /// Number and length of the eligible items of one direction.
    fn items(&mut self, size: &Size, procedure: &Procedure, what: &str) -> Option<Eligible> {
        if size.count > MAX_ITEMS {
            let name = &procedure.name;
            let message = format!("{what} of `{}` have {} eligible items, limit {MAX_ITEMS}", name.text, size.count);
            self.problems.add(&name.at, message);
        }
        let number = |value| u32::try_from(value).unwrap_or(u32::MAX);
        (size.count > 0).then(|| Eligible { count: number(size.count), max_len: number(size.max_len) })
    }

    /// Limit of the bytes of a message, as given or computed.
    fn limit(
        &mut self,
        [what, key]: [&str; 2],
        given: Option<&Spanned<u32>>,
        size: &Size,
        procedure: &Procedure,
        version: &str,
    ) -> u32 {
        if let Some(given) = given {
            if u64::from(*given.get_ref()) > size.max {
                self.report(&given.span(), format!("{} exceeds {}, the types' bound", given.get_ref(), size.max));
            }
            if u64::from(*given.get_ref()) < size.min {
                let message = format!("{} is less than {}, the shortest of all {what}", given.get_ref(), size.min);
                self.report(&given.span(), message);
            }
            return *given.get_ref();
        }
        if let Ok(max) = u32::try_from(size.max) {
            return max;
        }
        if self.has_file {
            let why = match &size.unbounded {
                Some(item) if size.max == UNBOUNDED => format!("{item} has no bound"),
                _ => format!("they have up to {} bytes", size.max),
            };
            let name = &procedure.name;
            // A list cannot have a bound.
            let bounds = if why.starts_with("list") { "" } else { ", or `[bounds]`" };
            let help = format!("give `{key}` under `[{version}.{}]` in the placement file{bounds}", name.text);
            self.problems.add(&name.at, format!("{what} of `{}` have no limit: {why}", name.text)).help(help);
        }
        DEFAULT_MAX
    }
}

/// Whether a key names a program. A version of this name takes precedence.
fn is_program(schema: &Schema, name: &str) -> bool {
    let mut versions = schema.programs.iter().flat_map(|program| &program.versions);
    schema.programs.iter().any(|program| program.name.text == name) && versions.all(|version| version.name.text != name)
}

/// Whether `ty` is opaque data, a string or an array of variable length.
fn is_variable(ty: &Type) -> bool {
    matches!(ty, Type::Opaque { .. } | Type::Text { .. } | Type::Array(..))
}

/// Splits a key into type and field.
fn split_key(key: &str) -> (&str, Option<&str>) {
    key.split_once('.').map_or((key, None), |(name, field)| (name, Some(field)))
}

/// The type that holds an item, and all items of the key.
///
/// An arm that is also the default is in a union twice. Two different arms of one name are an error of the
/// specification.
fn find_items<'s>(schema: &'s mut Schema, key: &str) -> Option<(TypeId, Vec<&'s mut Type>)> {
    let (name, field) = split_key(key);
    let id = schema.types.iter().position(|def| def.name.text == name)?;
    let form = &mut schema.types[id].form;
    let types = match (form, field) {
        (Form::Alias(ty), None) => vec![ty],
        (form, Some(field)) => {
            form.fields_mut().into_iter().filter(|found| found.name.text == field).map(|found| &mut found.ty).collect()
        }
        _ => Vec::new(),
    };
    Some((TypeId(id), types))
}

fn set_item(schema: &mut Schema, key: &str, ty: &Type) {
    for item in find_items(schema, key).into_iter().flat_map(|(_, items)| items) {
        *item = ty.clone();
    }
}
