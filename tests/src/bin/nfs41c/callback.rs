//! Callback program (RFC 8881 §20): CB_SEQUENCE and CB_RECALL.
//!
//! Other operations are not supported.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use rpcrdma::wire::xdr::{BadXdr, Reader};
use rpcrdma::{Procedure, Refusal, ServerCall, Services};

use crate::codec::{Encoder, OK, Read, Stateid};

/// Program number from the transient range (RFC 5531 §8.3).
pub(crate) const PROGRAM: u32 = 0x4000_0000;
const VERSION: u32 = 1;
/// The procedure besides NULL, which the engine answers.
const CB_COMPOUND: u32 = 1;
const CB_RECALL: u32 = 4;
const CB_SEQUENCE: u32 = 11;
const NFS4ERR_NOTSUPP: u32 = 10004;
const NFS4ERR_MINOR_VERS_MISMATCH: u32 = 10021;
const NFS4ERR_OP_NOT_IN_SESSION: u32 = 10071;
/// Longest file handle, in bytes.
const FH_MAX: usize = 128;

/// Callbacks of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// First operation of each callback.
    Sequence {
        slot: u32,
        sequence: u32,
    },
    Recall(Stateid),
    /// An unsupported operation.
    Other(u32),
}

/// The callback program; `tell` receives its events.
pub(crate) fn services(tell: Sender<Heard>) -> Arc<Services> {
    let tell = Mutex::new(tell);
    let compound = Procedure::new(move |call: &mut ServerCall| {
        let (results, heard) = compound(call.args()).map_err(|_| Refusal::GarbageArguments)?;
        for event in heard {
            // A callback without a listener is answered too.
            let _ = tell.lock().map(|tell| tell.send(event));
        }
        call.reply_mut(results.len())?.copy_from_slice(&results);
        Ok(())
    });
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, CB_COMPOUND, compound.max_reply(1024));
    Arc::new(services)
}

/// Runs a CB_COMPOUND; returns its results and its events.
fn compound(args: &[u8]) -> Result<(Vec<u8>, Vec<Heard>), BadXdr> {
    let mut args = Reader::new(args);
    let tag = args.text()?;
    let (minor, _ident, count) = (args.u32("minorversion")?, args.u32("ident")?, args.u32("operations")?);
    let (mut results, mut heard, mut done) = (Encoder::default(), Vec::new(), 0);
    let mut status = if minor == 1 { OK } else { NFS4ERR_MINOR_VERS_MISMATCH };
    while status == OK && done < count {
        let operation = args.u32("operation")?;
        results.u32(operation);
        status = match operation {
            CB_SEQUENCE => {
                let session = args.id()?;
                let [sequence, slot, highest] = [args.u32("seq")?, args.u32("slot")?, args.u32("highest")?];
                args.bool("cachethis")?;
                for _ in 0..args.u32("referring call lists")? {
                    args.id()?;
                    let calls = args.u32("referring calls")? as usize;
                    args.skip_words(calls.saturating_mul(2))?;
                }
                results.u32(OK).fixed(&session).words(&[sequence, slot, highest, highest]);
                heard.push(Heard::Sequence { slot, sequence });
                OK
            }
            CB_RECALL if done > 0 => {
                let stateid = Stateid(args.id()?);
                args.bool("truncate")?;
                args.opaque(FH_MAX, "file handle")?;
                results.u32(OK);
                heard.push(Heard::Recall(stateid));
                OK
            }
            other => {
                let status = if done > 0 { NFS4ERR_NOTSUPP } else { NFS4ERR_OP_NOT_IN_SESSION };
                results.u32(status);
                heard.push(Heard::Other(other));
                status
            }
        };
        done += 1;
    }
    let mut head = Encoder::default();
    head.u32(status).opaque(tag).u32(done).fixed(&results.0);
    Ok((head.0, heard))
}
