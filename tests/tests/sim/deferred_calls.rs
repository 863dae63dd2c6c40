//! Deferred calls, which are answered in random order.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rpcrdma::service::DeferredCall;
use rpcrdma::{Procedure, Refusal, ServerCall};
use rpcrdma_tests::Random;

/// The handler of a deferred call.
type Handler = Arc<dyn Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync>;

/// Unanswered deferred calls.
#[derive(Clone, Default)]
pub(crate) struct DeferredCalls(Arc<Mutex<Vec<(DeferredCall, Handler)>>>);

impl DeferredCalls {
    fn lock(&self) -> MutexGuard<'_, Vec<(DeferredCall, Handler)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A procedure that defers calls with an even XID and answers the others immediately.
    pub(crate) fn procedure(
        &self,
        handler: impl Fn(&mut ServerCall) -> Result<(), Refusal> + Send + Sync + 'static,
    ) -> Procedure {
        let (deferred, handler): (_, Handler) = (self.clone(), Arc::new(handler));
        Procedure::deferred(move |mut call| {
            if call.info().xid() & 1 == 0 {
                deferred.lock().push((call, Arc::clone(&handler)));
            } else {
                let outcome = handler(&mut call);
                call.answer(outcome);
            }
        })
    }

    /// Answers a random call. Returns 1 if the call's connection has closed, 0 if not, and `None` if there is no call.
    pub(crate) fn answer(&self, random: &mut Random) -> Option<u64> {
        let mut calls = self.lock();
        if calls.is_empty() {
            return None;
        }
        let index = random.below(calls.len());
        let (mut call, handler) = calls.swap_remove(index);
        drop(calls);
        let disconnected = call.is_disconnected();
        let outcome = handler(&mut call);
        call.answer(outcome);
        Some(u64::from(disconnected))
    }
}
