//! One-line text of a header, for traces and tools.

use std::fmt;

use super::codes::Version;
use super::error::ErrorBody;
use super::optional::{Operation, OperationCode};
use super::properties::{Property, PropertyId, PropertySet};
use super::view::{View, ViewBody};

/// Version, type and the fixed words, then flags, chunks, body and payload, if present. Example: `v2 MSG xid=0x00000007
/// credit=0x20 flags=RESPONSE reads=[0/0x1:512@0x1000] payload=64@60`. Segments are `handle:length@offset`. Read
/// segments start with their position. The payload is `length@offset`.
impl fmt::Display for View<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} xid={:#010x} credit={:#x}", self.version(), self.htype(), self.xid(), self.credit())?;
        if !self.flags().is_empty() {
            write!(f, " flags={}", self.flags())?;
        }
        if let Some(received) = self.received() {
            write!(f, " received={received}")?;
        }
        if self.inv_handle() != 0 {
            write!(f, " inv_handle={:#x}", self.inv_handle())?;
        }
        write_chunks(f, self)?;
        write_body(f, self)?;
        match self.payload().len() {
            0 => Ok(()),
            len => write!(f, " payload={len}@{}", self.payload_offset()),
        }
    }
}

fn write_chunks(f: &mut fmt::Formatter<'_>, view: &View<'_>) -> fmt::Result {
    if view.reads().next().is_some() {
        write_list(f, " reads=", view.reads())?;
    }
    if view.writes().next().is_some() {
        f.write_str(" writes=[")?;
        for (index, chunk) in view.writes().enumerate() {
            write_list(f, if index == 0 { "" } else { "," }, chunk.segments())?;
        }
        f.write_str("]")?;
    }
    view.reply_chunk().map_or(Ok(()), |chunk| write_list(f, " reply=", chunk.segments()))
}

fn write_list<T: fmt::Display>(f: &mut fmt::Formatter<'_>, label: &str, items: impl Iterator<Item = T>) -> fmt::Result {
    write!(f, "{label}[")?;
    for (index, item) in items.enumerate() {
        write!(f, "{}{item}", if index == 0 { "" } else { "," })?;
    }
    f.write_str("]")
}

fn write_body(f: &mut fmt::Formatter<'_>, view: &View<'_>) -> fmt::Result {
    match view.body() {
        ViewBody::Msg(()) | ViewBody::Nomsg(()) | ViewBody::Done => Ok(()),
        ViewBody::Msgp { align, thresh, .. } => write!(f, " align={align} thresh={thresh}"),
        // Version 1 calls this code ERR_CHUNK.
        ViewBody::Error(error @ ErrorBody::BadXdr) if view.version() == Version::V1 => {
            write!(f, " {}", error.name_in(Version::V1))
        }
        ViewBody::Error(error) => write!(f, " {error}"),
        ViewBody::Connprop(properties) => write_properties(f, "props", &properties, view),
        ViewBody::Optional { opttype, optinfo } => write_operation(f, opttype, optinfo, view),
    }
}

fn write_properties(
    f: &mut fmt::Formatter<'_>,
    label: &str,
    properties: &PropertySet<'_>,
    view: &View<'_>,
) -> fmt::Result {
    write!(f, " {label}=[")?;
    for (index, property) in properties.iter().enumerate() {
        f.write_str(if index == 0 { "" } else { "," })?;
        write_property(f, &property, view)?;
    }
    f.write_str("]")
}

/// `NAME:value`. Data other than one word is hexadecimal.
fn write_property(f: &mut fmt::Formatter<'_>, property: &Property<'_>, view: &View<'_>) -> fmt::Result {
    match PropertyId::of_revision(property.which, view.revision()) {
        Some(id) => write!(f, "{id}:")?,
        None => write!(f, "{:#x}:", property.which)?,
    }
    match (property.data, property.uint32()) {
        ([], _) => f.write_str("default"),
        ([_, _, _, _], Some(value)) => write!(f, "{value}"),
        (data, _) => data.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
    }
}

fn write_operation(f: &mut fmt::Formatter<'_>, opttype: u32, optinfo: &[u8], view: &View<'_>) -> fmt::Result {
    let Some(code) = OperationCode::from_code(opttype) else {
        return write!(f, " op={opttype} optinfo={} bytes", optinfo.len());
    };
    write!(f, " op={code}")?;
    match Operation::parse(code, optinfo) {
        Ok(Operation::Initial { start, constant }) => {
            write_properties(f, "start", &start, view)?;
            write_list(f, " constant=", constant.iter())
        }
        Ok(Operation::Request { want }) => write_properties(f, "want", &want, view),
        Ok(Operation::Respond { done, rejected, pending }) => {
            write_list(f, " done=", done.iter())?;
            write_list(f, " rejected=", rejected.iter())?;
            write_list(f, " pending=", pending.iter())
        }
        Ok(Operation::Update { now, clears_pending }) => {
            f.write_str(" now=")?;
            write_property(f, &now, view)?;
            write!(f, " clears_pending={clears_pending}")
        }
        Err(bad) => write!(f, " ({bad} of {})", optinfo.len()),
    }
}
