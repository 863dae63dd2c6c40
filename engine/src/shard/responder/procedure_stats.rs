//! Outcomes of peers' calls, by procedure.
//!
//! Counts all refusals, and sampled calls. Other calls cost nothing here.

use super::check::CallRefusal;
use crate::service::{Call, LocalServices, ProcedureName, Refused, Stamp};
use crate::stats::{MINUTE, ProcedureStats, Refusals, Values};
use crate::wire::rpc::{AcceptStat, RejectStat, ReplyBody};

#[derive(Debug, Default)]
pub(super) struct CallOutcomes {
    /// For all calls.
    refusals: Refusals,
    /// By the procedure's entry; up to the highest entry with an outcome.
    entries: Vec<ProcedureOutcomes>,
}

/// Outcomes of one procedure.
#[derive(Clone, Debug, Default)]
struct ProcedureOutcomes {
    bytes_in: u64,
    bytes_out: u64,
    /// Allocated for the first sampled call.
    latency: Option<Box<Values<MINUTE, 2>>>,
    refusals: Refusals,
}

/// Counter of such refusals; `None` if not counted.
fn kind<'a>(refusals: &'a mut Refusals, refusal: &CallRefusal) -> Option<&'a mut u64> {
    Some(match refusal {
        CallRefusal::NotACall => return None,
        CallRefusal::Transport(_) | CallRefusal::Undeclared { .. } | CallRefusal::TooLong { .. } => {
            &mut refusals.transport
        }
        CallRefusal::System(_) => &mut refusals.err_system,
        CallRefusal::Rpc(ReplyBody::Denied(RejectStat::AuthError(_))) => &mut refusals.authentication,
        CallRefusal::Rpc(ReplyBody::Denied(RejectStat::RpcMismatch { .. })) => &mut refusals.unavailable,
        CallRefusal::Rpc(ReplyBody::Accepted { stat, .. }) => match stat {
            AcceptStat::Success => return None,
            AcceptStat::ProgUnavail | AcceptStat::ProgMismatch { .. } | AcceptStat::ProcUnavail => {
                &mut refusals.unavailable
            }
            AcceptStat::GarbageArgs => &mut refusals.garbage_arguments,
            AcceptStat::SystemErr => &mut refusals.system_errors,
        },
    })
}

impl CallOutcomes {
    fn entry(&mut self, entry: usize) -> Option<&mut ProcedureOutcomes> {
        if self.entries.len() <= entry {
            self.entries.resize_with(entry + 1, ProcedureOutcomes::default);
        }
        self.entries.get_mut(entry)
    }

    #[cold]
    pub(super) fn record_refused(&mut self, call: &Call<Refused>, refusal: &CallRefusal) {
        if let Some(count) = kind(&mut self.refusals, refusal) {
            *count += 1;
        }
        let entry = match refusal {
            CallRefusal::Undeclared { entry, .. } => Some(*entry),
            _ => call.known_entry(),
        };
        if let Some(count) =
            entry.and_then(|entry| self.entry(entry)).and_then(|entry| kind(&mut entry.refusals, refusal))
        {
            *count += 1;
        }
    }

    /// Counts an ERR_SYSTEM for a lost call.
    #[cold]
    pub(super) fn record_lost(&mut self) {
        self.refusals.err_system += 1;
    }

    /// Records a sampled call of a procedure, with its duration in nanoseconds.
    pub(super) fn record_timed(&mut self, entry: usize, stamp: &Stamp, took: u64) {
        let Some(entry) = self.entry(entry) else { return };
        entry.bytes_in += stamp.bytes_in;
        entry.bytes_out += stamp.bytes_out;
        // Values beyond the histogram are clamped.
        entry.latency.get_or_insert_default().saturating_record(took);
    }

    /// Refusals of all calls.
    pub(super) fn refusals(&self) -> Refusals {
        self.refusals
    }

    /// Procedures of these services with any outcome.
    pub(super) fn procedures(&self, services: &LocalServices) -> Vec<ProcedureStats> {
        let counted = services.procedures().filter_map(|(name, entry)| {
            let ProcedureName { program, version, procedure } = name;
            let ProcedureOutcomes { bytes_in, bytes_out, latency, refusals } = self.entries.get(entry)?.clone();
            let latency = *latency.unwrap_or_default();
            let calls = latency.len();
            let any = calls > 0 || refusals != Refusals::default();
            any.then_some(ProcedureStats { program, version, procedure, calls, bytes_in, bytes_out, latency, refusals })
        });
        counted.collect()
    }
}
