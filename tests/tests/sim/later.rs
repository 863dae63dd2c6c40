//! Calls that handlers of a group have taken, and that are answered later, in any order.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rpcrdma::service::DeferredCall;
use rpcrdma::{Procedure, Refusal, ServerCall};
use rpcrdma_tests::Random;

/// What runs for a call when its time has come.
type Work = Arc<dyn Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync>;

/// The calls that are out.
#[derive(Clone, Default)]
pub(crate) struct Later(Arc<Mutex<Vec<(DeferredCall, Work)>>>);

impl Later {
    fn calls(&self) -> MutexGuard<'_, Vec<(DeferredCall, Work)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A procedure whose calls are taken; every other one is answered at once.
    pub(crate) fn procedure(
        &self,
        work: impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + 'static,
    ) -> Procedure {
        let (later, work): (_, Work) = (self.clone(), Arc::new(work));
        Procedure::deferred(move |mut call| {
            if call.xid() & 1 == 0 {
                later.calls().push((call, Arc::clone(&work)));
            } else {
                let outcome = work(&mut call);
                call.answer(outcome);
            }
        })
    }

    /// Answers one of them; how many were abandoned by then. `None` if none is out.
    pub(crate) fn answer(&self, random: &mut Random) -> Option<u64> {
        let mut calls = self.calls();
        if calls.is_empty() {
            return None;
        }
        let which = random.below(calls.len());
        let (mut call, work) = calls.swap_remove(which);
        drop(calls);
        let abandoned = call.is_abandoned();
        let outcome = work(&mut call);
        call.answer(outcome);
        Some(u64::from(abandoned))
    }
}
