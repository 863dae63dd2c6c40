//! Slots for results of calls, for blocking threads or futures.
//!
//! The table is allocated once. A call takes a slot from it and returns the slot, without allocation.
//!
//! A slot in use has two ends: the [`ResultTicket`] waits, the [`Completer`] completes. Both are moved, never cloned.
//! So no end of an earlier use reaches a slot in use, and a slot needs no generation.
//!
//! # Field-access protocol
//! `state` is a set of bits; a use starts with none (*pending*). DONE, COMPLETER_GONE and TICKET_GONE are set once per
//! use, so an addition sets them: it is one instruction, whereas `fetch_or` is a loop.
//!
//! | bit | set by | meaning |
//! | --- | --- | --- |
//! | `WAITER` | ticket (and cleared) | a waiter is in the `waiter` cell |
//! | `DONE` | completer | the result is in the `value` cell |
//! | `COMPLETER_GONE` | completer, after DONE | the completer has taken the waiter, and does not touch the slot again |
//! | `TICKET_GONE` | ticket | the ticket does not touch the slot again (*abandoned* without DONE) |
//!
//! 1. `value` belongs to the completer until it sets DONE. Then it belongs to the ticket, unless TICKET_GONE was set
//!    before DONE: in that case it stays the completer's.
//! 2. `waiter` belongs to the ticket while WAITER is clear, and to no end while it is set. It belongs to the completer
//!    once the completer sets DONE, or sees TICKET_GONE, while WAITER is set.
//! 3. The last end returns the slot, once, with both cells empty. The completer returns it if it finds TICKET_GONE. The
//!    ticket returns it if DONE was set without WAITER, because the completer has finished then. If WAITER was set when
//!    DONE was, both ends have work left: the completer sets COMPLETER_GONE, the ticket sets TICKET_GONE, and the
//!    second one returns the slot.
//! 4. No end touches a slot, or the table, after the step that lets the other end return the slot.
//! 5. The table is freed once its owner is gone and all slots are returned (`returned` counts them).
//!
//! SYNC POINTS: *result*: the completer's DONE (Release) with the ticket's load (Acquire). *waiter*: the ticket's
//! WAITER (Release) with the completer's DONE (Acquire). *end of use*: COMPLETER_GONE and TICKET_GONE, both AcqRel.
//! *return*: the push onto `returned` with the owner's take (see [`IndexStack`]).
#![expect(unsafe_code, reason = "cells change hands between threads, by the protocol above")]

use std::future::Future;
use std::mem::{MaybeUninit, forget};
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use crossbeam_utils::CachePadded;
use rpcrdma_mempool::IndexStack;
use rpcrdma_mempool::sync::cell::UnsafeCell;
use rpcrdma_mempool::sync::thread::{self, Thread};
use rpcrdma_mempool::sync::{AtomicU32, Ordering, hint};

use super::idle::{Idle, IdlePolicy, IdleStep};
use super::parker::park_thread;

const WAITER: u32 = 1;
const DONE: u32 = 2;
const COMPLETER_GONE: u32 = 4;
const TICKET_GONE: u32 = 8;

/// The call was dropped without a result, because its shard has stopped or has discarded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the call was dropped without a result: the shard has stopped")]
pub struct Disconnected;

/// The task or thread that waits for a result.
enum ResultWaiter {
    Task(Waker),
    Thread(Thread),
}

impl ResultWaiter {
    fn wake(self) {
        match self {
            Self::Task(waker) => waker.wake(),
            Self::Thread(thread) => thread.unpark(),
        }
    }
}

/// Slot for the result of one call, with its waiter.
struct ResultSlot<T> {
    state: AtomicU32,
    /// Next slot of the list that contains the free slot.
    next: AtomicU32,
    value: UnsafeCell<MaybeUninit<Result<T, Disconnected>>>,
    waiter: UnsafeCell<Option<ResultWaiter>>,
}

/// The slots of a table, shared by its owner and the ends of all slots in use.
struct SharedSlots<T> {
    slots: Box<[CachePadded<ResultSlot<T>>]>,
    /// Slots returned since the owner last took them. Once the owner is gone, the stack counts the slots not yet
    /// returned.
    returned: IndexStack,
    /// Read at each use and written when the table is freed, so that loom detects a use that races with it.
    #[cfg(loom)]
    life: UnsafeCell<()>,
}

impl<T> SharedSlots<T> {
    /// Link of a free slot to the next one.
    fn link(&self, index: u32) -> &AtomicU32 {
        &self.slots[index as usize].next
    }
}

/// Slots for outstanding calls, owned by the thread that starts calls.
pub struct SlotTable<T> {
    table: NonNull<SharedSlots<T>>,
    /// Head of the owner's own list of free slots.
    free: u32,
}

// SAFETY: the table lives until its last user has finished (rule 5). Values cross threads, hence `T: Send`, and so do
// waiters, which are `Send`; atomics order each change of hands (rules 1 to 3).
unsafe impl<T: Send> Send for SlotTable<T> {}

impl<T> SlotTable<T> {
    /// A table for `capacity` outstanding calls, at least 1.
    ///
    /// Each slot takes about `size_of::<T>() + 64` bytes, in whole pairs of cache lines against false sharing.
    pub fn new(capacity: u32) -> Self {
        let capacity = capacity.clamp(1, IndexStack::NIL - 2);
        let slot = |index: u32| ResultSlot {
            state: AtomicU32::new(0),
            next: AtomicU32::new(if index + 1 < capacity { index + 1 } else { IndexStack::NIL }),
            value: UnsafeCell::new(MaybeUninit::uninit()),
            waiter: UnsafeCell::new(None),
        };
        let table = Box::new(SharedSlots {
            slots: (0..capacity).map(|index| CachePadded::new(slot(index))).collect(),
            returned: IndexStack::default(),
            #[cfg(loom)]
            life: UnsafeCell::new(()),
        });
        Self { table: NonNull::from(Box::leak(table)), free: 0 }
    }

    /// Takes a slot for one call; `None` while all are in use.
    #[inline]
    pub fn acquire(&mut self) -> Option<(ResultTicket<T>, Completer<T>)> {
        let table = self.table();
        let mut index = self.free;
        if index == IndexStack::NIL {
            // SYNC POINT `return`: earlier users have finished with these slots. Without any, the result is NIL.
            index = table.returned.take();
            if index == IndexStack::NIL {
                return None;
            }
        }
        let slot = &table.slots[index as usize];
        let next = slot.next.load(Ordering::Relaxed);
        // The ring or lock that moves the ends to other threads orders this store.
        slot.state.store(0, Ordering::Relaxed);
        self.free = next;
        let end = SlotEnd { table: self.table, index };
        Some((ResultTicket { end: Some(end) }, Completer { end }))
    }

    fn table(&self) -> &SharedSlots<T> {
        // SAFETY: rule 5, the owner has a share in the table.
        unsafe { self.table.as_ref() }
    }
}

/// Creates a ticket and a completer with a slot of their own, for rare requests; allocates.
pub(crate) fn oneshot<T>() -> (ResultTicket<T>, Completer<T>) {
    SlotTable::new(1).acquire().expect("the only slot is free")
}

impl<T> Drop for SlotTable<T> {
    fn drop(&mut self) {
        let table = self.table();
        let in_use = table.slots.len() - IndexStack::list(self.free, |index| table.link(index)).count();
        if table.returned.close(in_use, |index| table.link(index)) {
            free(self.table);
        }
    }
}

/// Frees a table whose owner is gone, and whose slots are all returned.
fn free<T>(table: NonNull<SharedSlots<T>>) {
    // SAFETY: the pointer came from `Box::leak` in `new`, and `returned` lets one caller get here, once no share is
    // left. Free slots have empty cells (rule 3).
    let table = unsafe { Box::from_raw(table.as_ptr()) };
    #[cfg(loom)]
    table.life.with_mut(|_| ());
    drop(table);
}

/// Reference to a slot, as a ticket or a completer holds it.
#[derive(Debug)]
struct SlotEnd<T> {
    table: NonNull<SharedSlots<T>>,
    index: u32,
}

impl<T> Clone for SlotEnd<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SlotEnd<T> {}

impl<T> SlotEnd<T> {
    #[inline]
    fn table(&self) -> &SharedSlots<T> {
        // SAFETY: rules 4 and 5: an end is used only until its slot is returned, and the table lives until then.
        let table = unsafe { self.table.as_ref() };
        #[cfg(loom)]
        table.life.with(|_| ());
        table
    }

    #[inline]
    fn slot(&self) -> &ResultSlot<T> {
        &self.table().slots[self.index as usize]
    }

    /// Moves the result out of the value cell.
    ///
    /// # Safety
    /// The cell is the caller's (rule 1) and full.
    #[inline]
    unsafe fn take_value(&self) -> Result<T, Disconnected> {
        self.slot().value.with(|cell| {
            // SAFETY: the caller owns the cell, and it is full; it counts as empty from here on.
            unsafe { cell.cast::<Result<T, Disconnected>>().read() }
        })
    }

    /// Replaces the waiter; returns the previous one.
    ///
    /// # Safety
    /// The cell is the caller's (rule 2).
    unsafe fn swap_waiter(&self, waiter: Option<ResultWaiter>) -> Option<ResultWaiter> {
        self.slot().waiter.with_mut(|cell| {
            // SAFETY: the caller owns the cell, which always has a valid `Option`.
            unsafe { cell.replace(waiter) }
        })
    }

    /// Returns the slot; the end must not be used afterwards.
    #[inline]
    fn release(self) {
        // SYNC POINT `return`.
        if self.table().returned.push(self.index, &self.slot().next) {
            free(self.table);
        }
    }
}

/// The waiting end of a call.
///
/// [Poll](Self::try_take) it, [block](Self::wait) on it, or `.await` it. A ticket that is dropped before the result
/// arrives abandons the call, whose result is then dropped by the shard.
///
/// # Panics
/// If the future is polled after it was ready.
#[derive(Debug)]
#[must_use = "dropping a ticket abandons its call"]
pub struct ResultTicket<T> {
    /// `None` once the result was taken.
    end: Option<SlotEnd<T>>,
}

// SAFETY: see `SlotTable`; a ticket has the rights of rules 1 and 2 on any thread.
unsafe impl<T: Send> Send for ResultTicket<T> {}

impl<T> ResultTicket<T> {
    /// Takes the result, if it has arrived and was not taken before.
    #[inline]
    pub fn try_take(&mut self) -> Option<Result<T, Disconnected>> {
        let end = self.end?;
        // SYNC POINT `result`.
        let state = end.slot().state.load(Ordering::Acquire);
        if state & DONE == 0 {
            return None;
        }
        self.end = None;
        Some(take_result(end, state))
    }

    /// Waits for the result: polls, then sleeps.
    ///
    /// Returns `None` once the deadline has passed, or if the result was taken before. It may be called again.
    pub fn wait(&mut self, deadline: Option<Instant>) -> Option<Result<T, Disconnected>> {
        self.wait_with(IdlePolicy::default(), deadline)
    }

    /// Waits for the result as [`wait`](Self::wait) does, with an idle policy.
    pub fn wait_with(&mut self, policy: IdlePolicy, deadline: Option<Instant>) -> Option<Result<T, Disconnected>> {
        let mut idle = Idle::new(policy);
        loop {
            if let Some(result) = self.try_take() {
                return Some(result);
            }
            let end = self.end?;
            let in_time = match idle.after_empty_poll() {
                IdleStep::Spin => {
                    hint::spin_loop();
                    true
                }
                IdleStep::Yield => {
                    thread::yield_now();
                    deadline.is_none_or(|deadline| Instant::now() < deadline)
                }
                IdleStep::Sleep => !register(end, ResultWaiter::Thread(thread::current())) || park_thread(deadline),
            };
            if !in_time {
                return self.try_take();
            }
        }
    }
}

impl<T> Future for ResultTicket<T> {
    type Output = Result<T, Disconnected>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(result) = self.try_take() {
            return Poll::Ready(result);
        }
        let end = self.end.expect("the ticket is not polled after it was ready");
        if register(end, ResultWaiter::Task(cx.waker().clone())) {
            return Poll::Pending;
        }
        self.try_take().map_or(Poll::Pending, Poll::Ready)
    }
}

impl<T> Drop for ResultTicket<T> {
    fn drop(&mut self) {
        let Some(end) = self.end else { return };
        let state = &end.slot().state;
        let mut observed = state.load(Ordering::Acquire);
        while observed & DONE == 0 {
            // Until DONE is set, only this end changes the state. SYNC POINT `end of use`: orders this end's accesses
            // before the slot is returned, and before the table is freed.
            match state.compare_exchange_weak(observed, observed | TICKET_GONE, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => observed = now,
            }
        }
        drop(take_result(end, observed));
    }
}

/// Takes the result, and ends the ticket's use of the slot. `state` has DONE, loaded with Acquire.
#[inline]
fn take_result<T>(end: SlotEnd<T>, state: u32) -> Result<T, Disconnected> {
    // SAFETY: rule 1, DONE is set and TICKET_GONE is not, so the cell is the ticket's and full.
    let value = unsafe { end.take_value() };
    // Rule 3: without WAITER the completer had finished when it set DONE.
    let completer_gone = state & WAITER == 0 || state & COMPLETER_GONE != 0;
    if completer_gone || end.slot().state.fetch_add(TICKET_GONE, Ordering::AcqRel) & COMPLETER_GONE != 0 {
        // SYNC POINT `end of use`: the completer does not touch the slot again.
        end.release();
    }
    value
}

/// Stores the waiter in the slot; returns false if the result exists already.
fn register<T>(end: SlotEnd<T>, waiter: ResultWaiter) -> bool {
    let state = &end.slot().state;
    let mut observed = state.load(Ordering::Relaxed);
    // If an earlier waiter is in the cell, the ticket takes the cell back first.
    while observed == WAITER {
        match state.compare_exchange_weak(WAITER, 0, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => observed = 0,
            Err(now) => observed = now,
        }
    }
    if observed & DONE != 0 {
        return false;
    }
    // SAFETY: rule 2, WAITER is clear and only this end sets it.
    drop(unsafe { end.swap_waiter(Some(waiter)) });
    // SYNC POINT `waiter`.
    if state.compare_exchange(0, WAITER, Ordering::Release, Ordering::Relaxed).is_ok() {
        return true;
    }
    // SAFETY: rule 2, WAITER is still clear, so the completer, which has set DONE, does not touch the cell.
    drop(unsafe { end.swap_waiter(None) });
    false
}

/// The completing end of a call.
///
/// A completer that is dropped unused completes the call with [`Disconnected`].
#[derive(Debug)]
#[must_use = "dropping a completer ends its call without a result"]
pub struct Completer<T> {
    end: SlotEnd<T>,
}

// SAFETY: see `SlotTable`; a completer has the rights of rules 1 and 2 on any thread.
unsafe impl<T: Send> Send for Completer<T> {}

impl<T> Completer<T> {
    /// Completes the call with a result, and wakes its waiter. Drops the result if the ticket is gone.
    #[inline]
    pub fn complete(self, value: T) {
        let end = self.end;
        forget(self);
        finish(end, Ok(value));
    }

    /// Whether the ticket is gone, so that no waiter needs the result.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.end.slot().state.load(Ordering::Relaxed) & TICKET_GONE != 0
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        finish(self.end, Err(Disconnected));
    }
}

/// Stores the result in the slot, and ends the completer's use of it.
#[inline]
fn finish<T>(end: SlotEnd<T>, value: Result<T, Disconnected>) {
    end.slot().value.with_mut(|cell| {
        // SAFETY: rule 1, DONE is not set, because only this function sets it, once for each completer. So the cell is
        // the completer's, and it is empty, so no value is lost.
        unsafe { cell.cast::<Result<T, Disconnected>>().write(value) }
    });
    // SYNC POINTS result and waiter.
    let before = end.slot().state.fetch_add(DONE, Ordering::AcqRel);
    // If neither WAITER nor TICKET_GONE was set, the slot is the ticket's from here on (rule 4).
    if before != 0 {
        finish_with_waiter_or_abandoned(end, before);
    }
}

/// Wakes the waiter, or returns the slot of an abandoned call; `before` is the state before DONE was set.
#[cold]
fn finish_with_waiter_or_abandoned<T>(end: SlotEnd<T>, before: u32) {
    let waiter = if before & WAITER != 0 {
        // SAFETY: rule 2, WAITER was set when DONE was, or when the ticket set TICKET_GONE.
        unsafe { end.swap_waiter(None) }
    } else {
        None
    };
    if before & TICKET_GONE != 0 {
        // SAFETY: rule 1, TICKET_GONE was set before DONE, so the cell is still the completer's, and `finish` has
        // filled it.
        let value = unsafe { end.take_value() };
        end.release();
        drop((value, waiter));
        return;
    }
    // SYNC POINT `end of use`.
    if end.slot().state.fetch_add(COMPLETER_GONE, Ordering::AcqRel) & TICKET_GONE != 0 {
        end.release();
    }
    if let Some(waiter) = waiter {
        waiter.wake();
    }
}

#[cfg(test)]
mod tests;
