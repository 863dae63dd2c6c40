//! Callback program (RFC 8881 §20), with the operations CB_SEQUENCE and CB_RECALL only.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use rpcrdma::typed::{CallInfo, ReplySender, ReplySent};
use rpcrdma::{Refusal, Services};

use crate::protocol::nfs_cb::{self, Compound};
use crate::protocol::*;

/// An operation of a callback of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallbackEvent {
    /// CB_SEQUENCE, the first operation of each callback.
    Sequence { slot: u32, sequence: u32 },
    /// CB_RECALL, the recall of a delegation.
    Recall(Stateid4),
    /// The number of an unsupported operation.
    Other(u32),
}

/// The callback program; `sender` receives its events.
pub(crate) fn services(sender: Sender<CallbackEvent>) -> Arc<Services> {
    let mut services = Services::new();
    nfs_cb::add(&mut services, &Arc::new(Callbacks(sender)));
    Arc::new(services)
}

struct Callbacks(Sender<CallbackEvent>);

impl nfs_cb::Server for Callbacks {
    fn compound(
        &self,
        _: CallInfo<'_>,
        args: CbCompound4Args<'_>,
        answer: ReplySender<'_, Compound>,
    ) -> Result<ReplySent, Refusal> {
        let mut status = if args.minorversion == 1 { NFS4_OK } else { NFS4ERR_MINOR_VERS_MISMATCH };
        let (mut operations, mut results) = (args.argarray.iter(), Vec::new());
        while status == NFS4_OK
            && let Some(operation) = operations.next()
        {
            let (result, event) = match operation {
                NfsCbArgop4::Sequence(args) => {
                    let (slot, sequence) = (args.csa_slotid, args.csa_sequenceid);
                    let highest = args.csa_highest_slotid;
                    let results = CbSequence4Resok {
                        csr_sessionid: args.csa_sessionid,
                        csr_sequenceid: sequence,
                        csr_slotid: slot,
                        csr_highest_slotid: highest,
                        csr_target_highest_slotid: highest,
                    };
                    let results = NfsCbResop4::OpCbSequence(CbSequence4Res::Nfs4Ok(results));
                    (results, CallbackEvent::Sequence { slot, sequence })
                }
                NfsCbArgop4::Recall(args) if !results.is_empty() => {
                    (NfsCbResop4::Default(OP_CB_RECALL, NFS4_OK), CallbackEvent::Recall(args.stateid))
                }
                other => {
                    let number = match other {
                        NfsCbArgop4::Recall(_) => OP_CB_RECALL,
                        NfsCbArgop4::RecallAny(_) => OP_CB_RECALL_ANY,
                        NfsCbArgop4::Sequence(_) => OP_CB_SEQUENCE,
                        NfsCbArgop4::Default(number) => number,
                    };
                    status = if results.is_empty() { NFS4ERR_OP_NOT_IN_SESSION } else { NFS4ERR_NOTSUPP };
                    (NfsCbResop4::Default(number, status), CallbackEvent::Other(number))
                }
            };
            results.push(result);
            // The callback gets its answer even if the main loop has ended.
            let _ = self.0.send(event);
        }
        answer.send(&CbCompound4Res { status, tag: args.tag, resarray: results[..].into() })
    }
}
