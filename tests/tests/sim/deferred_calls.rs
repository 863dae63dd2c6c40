//! Deferred calls that are answered later, in any order.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rpcrdma::service::DeferredCall;
use rpcrdma::{Procedure, Refusal, ServerCall};
use rpcrdma_tests::Random;

/// The handler of a deferred call.
type Work = Arc<dyn Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync>;

/// Unanswered deferred calls.
#[derive(Clone, Default)]
pub(crate) struct DeferredCalls(Arc<Mutex<Vec<(DeferredCall, Work)>>>);

impl DeferredCalls {
    fn calls(&self) -> MutexGuard<'_, Vec<(DeferredCall, Work)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A procedure that defers calls with an even XID and answers the others at once.
    pub(crate) fn procedure(
        &self,
        work: impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + 'static,
    ) -> Procedure {
        let (later, work): (_, Work) = (self.clone(), Arc::new(work));
        Procedure::deferred(move |mut call| {
            if call.info().xid() & 1 == 0 {
                later.calls().push((call, Arc::clone(&work)));
            } else {
                let outcome = work(&mut call);
                call.answer(outcome);
            }
        })
    }

    /// Answers one call. Returns 1 if it was abandoned by then, 0 if not, `None` if there is none.
    pub(crate) fn answer(&self, random: &mut Random) -> Option<u64> {
        let mut calls = self.calls();
        if calls.is_empty() {
            return None;
        }
        let which = random.below(calls.len());
        let (mut call, work) = calls.swap_remove(which);
        drop(calls);
        let abandoned = call.is_disconnected();
        let outcome = work(&mut call);
        call.answer(outcome);
        Some(u64::from(abandoned))
    }
}
