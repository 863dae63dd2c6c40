//! An interpreter of schemas, which decodes the values of a message by their types.

use std::vec::IntoIter;

use rpcrdma::wire::View;
use rpcrdma_xdr::{Decoder, padded};
use serde_json::{Map, Number, Value, json};
use xdrgen::schema::{Field, Form, Schema, Type, TypeId, Union};

/// Maximum elements of an array or list that are kept.
const MAX_ELEMENTS: usize = 4;
/// Maximum bytes of opaque data that are kept.
const MAX_OPAQUE: usize = 64;
/// Maximum bytes of a string that are kept.
const MAX_TEXT: usize = 255;
/// Deepest nesting of types.
const MAX_DEPTH: usize = 256;

/// The chunks of a message that contain data.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    /// Position and length of each Read chunk.
    reads: Vec<(usize, u64)>,
    /// Lengths of Write chunks.
    writes: IntoIter<u64>,
    /// Bytes of the items that were in chunks so far, with their padding.
    chunk_bytes: usize,
}

impl Chunks {
    /// Reads the Read list of a call.
    pub(super) fn of_call(view: &View<'_>) -> Self {
        let mut reads: Vec<(usize, u64)> = Vec::new();
        for segment in view.reads().filter(|segment| segment.position != 0) {
            let (position, length) = (segment.position as usize, u64::from(segment.target.length));
            match reads.iter_mut().find(|read| read.0 == position) {
                Some(read) => read.1 += length,
                None => reads.push((position, length)),
            }
        }
        Self { reads, ..Self::default() }
    }

    /// Reads the Write list of a reply.
    pub(super) fn of_reply(view: &View<'_>) -> Self {
        let writes: Vec<u64> = view.writes().map(|chunk| chunk.total_length()).collect();
        Self { writes: writes.into_iter(), ..Self::default() }
    }

    /// Takes the chunk of an item with `len` bytes, whose data would be at byte `at`. Returns its kind and length.
    ///
    /// `None` if the item is inline. Each eligible result takes the next Write chunk, even an empty result. If that
    /// chunk is empty, the result is inline.
    fn take_chunk(&mut self, at: usize, is_bulk: bool, len: u32) -> Option<(&'static str, u64)> {
        let position = at + self.chunk_bytes;
        if let Some(index) = self.reads.iter().position(|read| len > 0 && read.0 == position) {
            return Some(("read", self.reads.swap_remove(index).1));
        }
        if is_bulk { self.writes.next().filter(|&len| len > 0).map(|len| ("write", len)) } else { None }
    }
}

/// Decodes arguments or results.
pub(super) struct BodyDecoder<'s, 'b> {
    schema: &'s Schema,
    input: Decoder<'b>,
    chunks: Chunks,
    /// Names of the fields that lead to the current value.
    path: Vec<&'s str>,
    depth: usize,
    error: Option<String>,
}

impl<'s, 'b> BodyDecoder<'s, 'b> {
    /// Creates a decoder at byte `at` of an RPC message.
    pub(super) fn new(schema: &'s Schema, message: &'b [u8], at: usize, chunks: Chunks) -> Self {
        let input = Decoder::starting_at(message, at);
        Self { schema, input, chunks, path: Vec::new(), depth: 0, error: None }
    }

    /// Decodes values of all types. Returns them and the first error; values before an error are kept.
    pub(super) fn decode_all(mut self, types: &'s [Type]) -> (Value, Option<String>) {
        let value = match types {
            [] => None,
            [one] => self.value(one),
            types => Some(self.sequence(types.iter())),
        };
        let value = value.unwrap_or_else(|| json!({}));
        if self.error.is_none() {
            let rest = self.input.rest().len();
            if rest > 0 {
                self.fail::<()>(0, format!("{rest} extra bytes"));
            } else if let Some((position, _)) = self.chunks.reads.first() {
                self.fail::<()>(0, format!("no item at position {position} of a Read chunk"));
            }
        }
        (value, self.error)
    }

    /// Records an error that begins `back` bytes before the current position, unless there is an earlier error.
    fn fail<T>(&mut self, back: usize, why: String) -> Option<T> {
        let (at, path) = (self.input.at() - back, self.path.join("."));
        let colon = if path.is_empty() { "" } else { ": " };
        self.error.get_or_insert_with(|| format!("{path}{colon}{why} at byte {at}"));
        None
    }

    fn bytes(&mut self, len: usize) -> Option<&'b [u8]> {
        match self.input.bytes(len, "bytes") {
            Ok(bytes) => Some(bytes),
            Err(_) => self.fail(0, format!("needs {len} bytes, {} are left", self.input.rest().len())),
        }
    }

    fn word(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.bytes(4)?.try_into().ok()?))
    }

    fn double_word(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(self.bytes(8)?.try_into().ok()?))
    }

    fn bool(&mut self) -> Option<bool> {
        match self.word()? {
            word @ ..2 => Some(word == 1),
            word => self.fail(4, format!("invalid bool {word}")),
        }
    }

    /// Decodes a length or count, and checks its bound.
    fn len(&mut self, max: Option<u32>) -> Option<u32> {
        let len = self.word()?;
        match max {
            Some(max) if len > max => self.fail(4, format!("length {len} exceeds {max}")),
            _ => Some(len),
        }
    }

    fn fixed(&mut self, len: u32) -> Option<&'b [u8]> {
        let bytes = self.bytes(len as usize)?;
        self.bytes(padded(bytes.len()) - bytes.len())?;
        Some(bytes)
    }

    /// Decodes variable-length data with `show`, or describes its chunk.
    fn variable(&mut self, max: Option<u32>, is_bulk: bool, show: fn(&[u8]) -> Value) -> Option<Value> {
        let len = self.len(max)?;
        let Some((kind, bytes)) = self.chunks.take_chunk(self.input.at(), is_bulk, len) else {
            return self.fixed(len).map(show);
        };
        // A chunk may have room for the padding.
        if !(u64::from(len)..=padded(len as usize) as u64).contains(&bytes) {
            return self.fail(4, format!("item of {len} bytes in a {kind} chunk of {bytes} bytes"));
        }
        self.chunks.chunk_bytes += padded(len as usize);
        Some(json!({"bytes": len, "chunk": kind}))
    }

    /// Decodes a value. After an error, returns a part of it or `None`.
    fn value(&mut self, ty: &'s Type) -> Option<Value> {
        if self.depth == MAX_DEPTH {
            return self.fail(0, format!("types are nested deeper than {MAX_DEPTH}"));
        }
        self.depth += 1;
        let value = self.decode_by_type(ty);
        self.depth -= 1;
        value
    }

    fn decode_by_type(&mut self, ty: &'s Type) -> Option<Value> {
        Some(match ty {
            Type::Int => self.word()?.cast_signed().into(),
            Type::UnsignedInt => self.word()?.into(),
            Type::Hyper => self.double_word()?.cast_signed().into(),
            Type::UnsignedHyper => self.double_word()?.into(),
            Type::Float => float(f32::from_bits(self.word()?).into()),
            Type::Double => float(f64::from_bits(self.double_word()?)),
            Type::Bool => self.bool()?.into(),
            Type::Void => json!({}),
            Type::FixedOpaque(len) => opaque(self.fixed(*len)?),
            Type::Opaque { max, is_bulk } => return self.variable(*max, *is_bulk, opaque),
            Type::Text { max, is_bulk } => return self.variable(*max, *is_bulk, text),
            Type::FixedArray(element, count) => self.sequence((0..*count).map(|_| &**element)),
            Type::Array(element, max) => {
                let count = self.len(*max)?;
                self.sequence((0..count).map(|_| &**element))
            }
            Type::Optional(inner) => return if self.bool()? { self.value(inner) } else { Some(Value::Null) },
            Type::List(element) => self.list(*element),
            Type::Named(id) | Type::Recursive(id) => return self.named(*id),
        })
    }

    fn named(&mut self, id: TypeId) -> Option<Value> {
        let schema = self.schema;
        let named = schema.types.get(id.0)?;
        match &named.form {
            Form::Alias(ty) => self.value(ty),
            Form::Enum(values) => {
                let word = self.word()?;
                match values.iter().find(|value| value.value as u32 == word) {
                    Some(value) => Some(value.name.text.as_str().into()),
                    None => self.fail(4, format!("invalid {} {}", named.name.text, word.cast_signed())),
                }
            }
            Form::Struct { fields, .. } => Some(self.fields(fields)),
            Form::Union(union) => Some(self.union(union)),
        }
    }

    fn union(&mut self, union: &'s Union) -> Value {
        let mut values = Map::new();
        let word = self.input.rest().first_chunk().map(|word| u32::from_be_bytes(*word));
        self.field(&union.switch, &mut values);
        let (None, Some(word)) = (&self.error, word) else { return values.into() };
        let is_selected = |value: i128| value as u32 == word;
        let arm = union.arms.iter().find(|arm| arm.cases.iter().any(|case| is_selected(case.value)));
        match (arm.map(|arm| &arm.field), &union.default) {
            (Some(field), _) | (None, Some(field)) => {
                if let Some(field) = field {
                    self.field(field, &mut values);
                }
            }
            (None, None) => _ = self.fail::<()>(4, format!("no arm for {}", word.cast_signed())),
        }
        values.into()
    }

    fn fields(&mut self, fields: &'s [Field]) -> Value {
        let mut values = Map::new();
        for field in fields {
            self.field(field, &mut values);
            if self.error.is_some() {
                break;
            }
        }
        values.into()
    }

    fn field(&mut self, field: &'s Field, values: &mut Map<String, Value>) {
        self.path.push(&field.name.text);
        if let Some(value) = self.value(&field.ty) {
            values.insert(field.name.text.clone(), value);
        }
        self.path.pop();
    }

    fn sequence(&mut self, types: impl Iterator<Item = &'s Type>) -> Value {
        let mut first = FirstElements::default();
        for ty in types {
            match self.value(ty) {
                Some(value) => first.push(value),
                None => break,
            }
            if self.error.is_some() {
                break;
            }
        }
        first.value()
    }

    fn list(&mut self, element: TypeId) -> Value {
        let mut first = FirstElements::default();
        while self.error.is_none() && self.bool() == Some(true) {
            if let Some(value) = self.named(element) {
                first.push(value);
            }
        }
        first.value()
    }
}

/// The first elements of a sequence, and the number of others.
#[derive(Default)]
struct FirstElements {
    elements: Vec<Value>,
    more: u64,
}

impl FirstElements {
    fn push(&mut self, value: Value) {
        if self.elements.len() < MAX_ELEMENTS { self.elements.push(value) } else { self.more += 1 }
    }

    fn value(mut self) -> Value {
        if self.more > 0 {
            self.elements.push(json!({"more": self.more}));
        }
        self.elements.into()
    }
}

fn float(value: f64) -> Value {
    Number::from_f64(value).map_or_else(|| value.to_string().into(), Value::from)
}

fn opaque(bytes: &[u8]) -> Value {
    let hex = |bytes: &[u8]| bytes.iter().fold("0x".to_owned(), |text, byte| format!("{text}{byte:02x}"));
    match bytes.get(..MAX_OPAQUE) {
        Some(first) if bytes.len() > MAX_OPAQUE => json!({"bytes": bytes.len(), "first": hex(first)}),
        _ => hex(bytes).into(),
    }
}

fn text(bytes: &[u8]) -> Value {
    let text = |bytes| String::from_utf8_lossy(bytes);
    match bytes.get(..MAX_TEXT) {
        Some(first) if bytes.len() > MAX_TEXT => json!({"bytes": bytes.len(), "first": text(first)}),
        _ => text(bytes).into(),
    }
}
