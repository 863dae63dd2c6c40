//! The callback program (RFC 8881 §20), which the server calls: CB_SEQUENCE and CB_RECALL; all else is not
//! supported.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use rpcrdma::wire::xdr::{BadXdr, Reader};
use rpcrdma::{Procedure, Refusal, ServerCall, Services};

use crate::codec::{Encoder, OK, Read, Stateid};

/// Program number of our choice, from those that are for that (RFC 5531 §8.3).
pub(crate) const PROGRAM: u32 = 0x4000_0000;
const VERSION: u32 = 1;
/// The procedure beside NULL, which answers by itself.
const CB_COMPOUND: u32 = 1;
const CB_RECALL: u32 = 4;
const CB_SEQUENCE: u32 = 11;
const NFS4ERR_NOTSUPP: u32 = 10004;
const NFS4ERR_MINOR_VERS_MISMATCH: u32 = 10021;
const NFS4ERR_OP_NOT_IN_SESSION: u32 = 10071;
/// Most bytes of a file handle.
const FH_MAX: usize = 128;

/// What the server has called for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Every callback begins with one.
    Sequence {
        slot: u32,
        sequence: u32,
    },
    Recall(Stateid),
    /// Nothing that is supported.
    Other(u32),
}

/// Tells what is heard.
pub(crate) fn services(tell: Sender<Heard>) -> Arc<Services> {
    let tell = Mutex::new(tell);
    let compound = Procedure::new(move |call: &mut ServerCall| {
        let (results, heard) = compound(call.args()).map_err(|_| Refusal::GarbageArguments)?;
        for event in heard {
            // One that nobody waits for any more is answered all the same.
            let _ = tell.lock().map(|tell| tell.send(event));
        }
        call.reply_mut(results.len())?.copy_from_slice(&results);
        Ok(())
    });
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, CB_COMPOUND, compound.max_reply(1024));
    Arc::new(services)
}

/// Carries out a CB_COMPOUND: its results, and what it says.
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
