//! Blocking wait for a future, without a runtime.
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::parker::{Parker, Wake};

/// Blocks this thread until the future is ready.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut parker = Parker::new(Wake::Thread);
    let waker = Waker::from(parker.signal());
    let mut future = pin!(future);
    loop {
        // The parker is armed before the poll, so that no wake-up is lost.
        parker.arm();
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => parker.park(None),
        }
    }
}
