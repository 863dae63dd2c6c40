//! Flow control: three credit modes with exact counts.
//!
//! All three modes follow the same rule. A *sender* has sent `sent` messages and may continue up to `limit`. A
//! *receiver* has received `received` messages and has announced `announced_limit`, for which it reserves Receives. The
//! modes differ in the encoding of the limit:
//!
//! | mode | `rdma_credit` | resulting limit |
//! |---|---|---|
//! | [`CreditMode::V2Windowed`] | credits from here on | `received` word + credits |
//! | [`CreditMode::V2Incremental`] | low half: newly granted; high half: maximum outstanding | previous limit + newly granted, but no more outstanding than the maximum |
//! | [`CreditMode::V1`] | requested, or granted, calls outstanding | calls answered + granted |
//!
//! A client's initial limit is 1 and a server's 0 (draft-ietf-nfsv4-rpcrdma-version-two-00 §4.3.3). In version 1 it is
//! 1 in either direction (RFC 8166 §3.3.1). A pure grant may exceed the limit by one, so every receiver of version 2
//! keeps one Receive for it (version 2 §4.3.1.2).

use super::fault::PeerFault;
use super::wire::{self, ChunkCounts, Version};

/// The credit accounting of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum CreditMode {
    /// Version 2 with the count of received messages in every header.
    V2Windowed,
    /// Version 2 as specified: each header grants an increment.
    V2Incremental,
    /// RFC 8166 §3.3: calls outstanding.
    V1,
}

/// The smallest credit limit. Below it, grants could answer grants without end.
pub const MIN_CREDITS: u32 = 4;
/// The largest credit limit: an increment must fit 16 bits.
pub const MAX_CREDITS: u32 = 0x7FFF;

/// Maximum consecutive pure grants that announce a single credit. Without a bound, two idle peers would answer each
/// other's grants without end.
const MAX_CONSECUTIVE_GRANTS: u8 = 4;

/// Credits for replies only. An end with outstanding calls grants them beyond its credit limit, and its peer does not
/// use them for calls of its own.
pub(super) const REPLY_CREDITS: u32 = 2;

/// The two credit words of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CreditWords {
    /// `rdma_credit`.
    pub credit: u32,
    /// The count of messages received, in windowed mode.
    pub received: Option<u32>,
}

/// Both directions of one connection's flow control. Counters wrap at 2^32.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Credits {
    credit_mode: CreditMode,
    /// Messages that count against the peer's limit: version 1 counts calls only.
    sent: u32,
    /// Limit of `sent`.
    limit: u32,
    /// Incremental: sum of the peer's grants. `limit` is lower while the peer permits fewer outstanding messages.
    granted: u32,
    /// The received count in the peer's last header; windowed only.
    acknowledged: u32,
    /// Counted messages of the peer: all in version 2, calls in version 1.
    received: u32,
    /// The limit announced to the peer, which may not have received it yet.
    announced_limit: u32,
    /// Incremental: the part of `announced_limit` that no message has announced so far. A client keeps a Receive for
    /// its server's first message, and announces it in its own first message.
    unannounced: u32,
    /// The credit limit that this side offers: Receives, within [`MIN_CREDITS`] and [`MAX_CREDITS`]. In version 1:
    /// concurrent calls of the peer.
    credit_limit: u32,
    /// Version 1: Receives for replies to this side's calls.
    reply_receives: u32,
    /// Version 1 requester: calls answered, or known to remain unanswered.
    answered: u32,
    /// `received` when the peer last got a full report.
    reported: u32,
    /// `received` as last reported to the peer, plus one per pure grant since.
    reported_payload: u32,
    /// Consecutive pure grants since either end's last other message.
    consecutive_grants: u8,
    /// Incremental: messages that the peer surely had received at its last grant.
    received_by_peer: u32,
    /// Payload-bearing messages after which a pure grant is due.
    grant_after: u32,
    /// Whether pure grants wait until half the credit limit is unreported.
    coalesce: bool,
}

impl Credits {
    /// A new connection, at its client or at its server. `credit_limit` is clamped to its bounds; without
    /// `coalesce` each message is reported immediately.
    pub fn new(credit_mode: CreditMode, server: bool, credit_limit: u32, coalesce: bool) -> Self {
        let credit_limit = credit_limit.clamp(MIN_CREDITS, MAX_CREDITS);
        // Only a client has a credit without a grant.
        let limit = u32::from(!server || credit_mode == CreditMode::V1);
        Self {
            credit_mode,
            sent: 0,
            limit,
            granted: limit,
            acknowledged: 0,
            received: 0,
            announced_limit: 1,
            unannounced: u32::from(!server && credit_mode == CreditMode::V2Incremental),
            credit_limit,
            reply_receives: credit_limit,
            answered: 0,
            reported: 0,
            reported_payload: 0,
            consecutive_grants: 0,
            received_by_peer: 0,
            grant_after: if coalesce { credit_limit / 2 } else { 1 },
            coalesce,
        }
    }

    /// A version 1 connection, with separate counts per direction (RFC 8167 §4.1): `inbound` concurrent calls of the
    /// peer, and `outbound` of this side. Either may be 0.
    pub fn version_1(inbound: u32, outbound: u32) -> Self {
        Self {
            credit_limit: inbound.min(MAX_CREDITS),
            reply_receives: outbound.min(MAX_CREDITS),
            ..Self::new(CreditMode::V1, true, 0, false)
        }
    }

    /// The credit mode of this side's messages.
    #[inline]
    pub fn credit_mode(&self) -> CreditMode {
        self.credit_mode
    }

    /// Whether this side's headers are windowed.
    #[inline]
    pub fn is_windowed(&self) -> bool {
        self.credit_mode == CreditMode::V2Windowed
    }

    /// Bytes of this mode's header with these chunks, with or without payload.
    #[inline]
    pub fn header_len(&self, chunks: &ChunkCounts) -> usize {
        let version = if self.credit_mode == CreditMode::V1 { Version::V1 } else { Version::V2 };
        wire::msg_len(version, self.is_windowed()) + chunks.encoded_len()
    }

    /// Makes this side's headers windowed from the next message on. Counts and limits mean the same in both modes of
    /// version 2.
    pub fn switch_to_windowed(&mut self) {
        self.credit_mode = CreditMode::V2Windowed;
    }

    /// The credit limit: concurrent messages of the peer (version 1: calls).
    #[inline]
    pub fn credit_limit(&self) -> u32 {
        self.credit_limit
    }

    /// Version 1: maximum concurrent calls tolerated, which is twice the credit limit. Deployed clients abandon calls,
    /// for instance when a process is killed or a mount is forced off, and reuse their credits before the replies.
    #[inline]
    pub fn tolerated(&self) -> u32 {
        2 * self.credit_limit
    }

    /// Receives beyond the [`reserve`](Self::reserve) for tolerated calls, to be posted while enough buffers are left.
    pub fn overcommit(&self) -> u32 {
        if self.credit_mode == CreditMode::V1 { self.tolerated() - self.credit_limit } else { 0 }
    }

    /// Receives to reserve for these credits, plus one (in version 2 for a pure grant), with `taken` calls of the peer
    /// in progress.
    pub fn reserve(&self, taken: u32) -> u32 {
        match self.credit_mode {
            CreditMode::V1 => self.credit_limit + self.reply_receives + 1,
            CreditMode::V2Windowed | CreditMode::V2Incremental => self.claimed_receives(taken) + 1,
        }
    }

    /// Version 2: Receives that the peer's messages and calls may hold. When the credit limit shrinks, announced
    /// credits stay valid, and calls in progress keep their Receives.
    fn claimed_receives(&self, taken: u32) -> u32 {
        self.credit_limit.max(self.peer_credits() + taken)
    }

    /// Messages that the peer may still send by the announced limit.
    #[inline]
    fn peer_credits(&self) -> u32 {
        (self.announced_limit.wrapping_sub(self.received) as i32).max(0) as u32
    }

    /// Version 2: Receives of the [`reserve`](Self::reserve) not needed while `taken` calls are in progress and
    /// `window` applies.
    pub fn spared(&self, taken: u32, window: u32) -> u32 {
        self.claimed_receives(taken) - window.min(self.credit_limit).max(self.peer_credits())
    }

    /// Version 2: messages that the peer may send beyond those received, with `taken` of `slots` in use.
    ///
    /// While this side has `called`, the window has a few more credits for the replies. Messages that have begun must
    /// be completed, even if the peer's calls exceed a reduced credit limit. So the window has at least one credit
    /// while a reply is expected, or while a message of the peer is `incomplete`. A second credit would admit another
    /// call.
    #[inline]
    pub(super) fn grant_window(&self, taken: u32, slots: u32, called: bool, incomplete: bool) -> u32 {
        let for_replies = if called { REPLY_CREDITS } else { 0 };
        let minimum = u32::from((called || incomplete) && taken < slots);
        self.credit_limit.min((self.credit_limit + for_replies).saturating_sub(taken).max(minimum))
    }

    /// Version 2: credits that the peer has used and not received back.
    pub fn used(&self) -> u32 {
        self.credit_limit.saturating_sub(self.peer_credits())
    }

    /// Offers more Receives from now on, or fewer, within [`MIN_CREDITS`] and [`MAX_CREDITS`]. Credits already granted
    /// stay valid. Version 1 only grows: a lower grant could not be enforced against calls under way.
    pub fn set_credit_limit(&mut self, credit_limit: u32) {
        let credit_limit = credit_limit.clamp(MIN_CREDITS, MAX_CREDITS);
        self.credit_limit =
            if self.credit_mode == CreditMode::V1 { self.credit_limit.max(credit_limit) } else { credit_limit };
        self.grant_after = if self.coalesce { self.credit_limit / 2 } else { 1 };
    }

    /// Messages (version 1: calls) that may be sent now.
    #[inline]
    pub fn available(&self) -> u32 {
        (self.limit.wrapping_sub(self.sent) as i32).max(0) as u32
    }

    /// Whether a message (version 1: a `counted` call) may be sent now. In version 1 each message lets the peer send
    /// one more, so none is sent until its Receive is `replenished`.
    #[inline]
    pub fn may_send(&self, counted: bool, replenished: bool) -> bool {
        match self.credit_mode {
            CreditMode::V1 => replenished && (!counted || self.available() > 0),
            CreditMode::V2Windowed | CreditMode::V2Incremental => self.available() > 0,
        }
    }

    /// Counts a sent message, and returns its credit words. `counted` is false for version 1 replies and errors, which
    /// use the credit of their call. The words announce a `window` of messages beyond those received. Without a window,
    /// because Receives are lacking, they repeat the earlier limit.
    #[inline]
    pub fn on_send(&mut self, counted: bool, window: Option<u32>) -> CreditWords {
        self.sent = self.sent.wrapping_add(u32::from(counted));
        if self.credit_mode == CreditMode::V1 {
            // A call requests credits, a reply grants them.
            let credit = if counted { self.reply_receives } else { self.credit_limit };
            return CreditWords { credit, received: None };
        }
        self.consecutive_grants = 0;
        self.announce(window)
    }

    /// Counts a sent pure grant of version 2, and returns its credit words.
    #[cold]
    pub fn on_send_grant(&mut self, window: Option<u32>) -> CreditWords {
        self.sent = self.sent.wrapping_add(1);
        self.consecutive_grants = self.consecutive_grants.saturating_add(1);
        self.announce(window)
    }

    #[inline]
    fn announce(&mut self, window: Option<u32>) -> CreditWords {
        // The limit that earlier messages have announced. This message announces the rest.
        let announced_before = self.announced_limit.wrapping_sub(std::mem::take(&mut self.unannounced));
        if let Some(window) = window {
            self.raise_limit(window);
        }
        self.words(announced_before)
    }

    /// Counts a sent message in the windowed mode, like [`on_send`](Self::on_send) with a window. Returns the current
    /// credits and the count of received messages.
    #[inline(always)]
    pub fn on_send_windowed(&mut self, window: u32) -> (u32, u32) {
        // The limit is raised first, because most callers know here that the window is the credit limit.
        self.raise_limit(window);
        self.sent = self.sent.wrapping_add(1);
        self.consecutive_grants = 0;
        (self.announced_limit.wrapping_sub(self.received), self.received)
    }

    /// Raises the announced limit to `window` beyond received messages; never lowers it.
    #[inline]
    fn raise_limit(&mut self, window: u32) {
        // Only a full window is a full report, after which no pure grant is due.
        if window >= self.credit_limit {
            self.reported = self.received;
        }
        self.reported_payload = self.received;
        let limit = self.received.wrapping_add(window);
        if (limit.wrapping_sub(self.announced_limit) as i32) > 0 {
            self.announced_limit = limit;
        }
    }

    /// The credit words of a header; `announced_before` is the limit announced earlier.
    #[inline]
    fn words(&self, announced_before: u32) -> CreditWords {
        if self.credit_mode == CreditMode::V2Windowed {
            let remaining = self.announced_limit.wrapping_sub(self.received) as i32;
            if remaining < 0 {
                // The one message beyond the limit has arrived. Report one message less, so that the sum is the limit.
                return CreditWords { credit: 0, received: Some(self.announced_limit) };
            }
            CreditWords { credit: remaining as u32, received: Some(self.received) }
        } else {
            let newly = self.announced_limit.wrapping_sub(announced_before);
            // Announced credits stay valid, so a lower limit is announced only as far as it has taken effect.
            CreditWords { credit: (self.credit_limit.max(self.peer_credits()) << 16) | newly, received: None }
        }
    }

    /// Processes a message's credit words, and counts the message in version 2. `payload` is false for pure grants. In
    /// version 1, the message must answer a call of this side, because only such messages grant credits.
    ///
    /// # Errors
    /// The peer exceeded its limit or acknowledged an unsent message. The connection must end.
    #[inline(always)]
    pub fn on_receive(&mut self, words: CreditWords, payload: bool) -> Result<(), PeerFault> {
        let Some(acknowledged) = words.received else { return self.on_receive_uncounted(words.credit, payload) };
        self.count(payload)?;
        self.on_windowed(acknowledged, words.credit)
    }

    /// Processes the credit word of a message without a count of received messages.
    fn on_receive_uncounted(&mut self, credit: u32, payload: bool) -> Result<(), PeerFault> {
        if self.credit_mode == CreditMode::V1 {
            // A grant of 0 would be a deadlock (RFC 8166 §3.3.1), so it counts as 1, as with deployed peers.
            // Outstanding calls beyond the Receives for their replies would not help.
            self.limit = self.answered.wrapping_add(credit.clamp(1, self.reply_receives.max(1)));
            return Ok(());
        }
        self.count(payload)?;
        self.on_increment(credit)
    }

    /// Processes a windowed grant: messages acknowledged and credits beyond them.
    #[inline]
    fn on_windowed(&mut self, acknowledged: u32, credit: u32) -> Result<(), PeerFault> {
        self.acknowledge(acknowledged)?;
        let window = if credit > MAX_CREDITS { clamp_window(credit)? } else { credit };
        self.limit = acknowledged.wrapping_add(window);
        Ok(())
    }

    /// Records the count of messages that the peer has received.
    #[inline]
    fn acknowledge(&mut self, acknowledged: u32) -> Result<(), PeerFault> {
        let outstanding = self.sent.wrapping_sub(self.acknowledged);
        if acknowledged.wrapping_sub(self.acknowledged) > outstanding {
            return Err(self.acknowledged_too_much(acknowledged));
        }
        self.acknowledged = acknowledged;
        Ok(())
    }

    /// Processes an incremental grant. The low half has the increment, the high half the outstanding limit (version 2
    /// §4.3.1.1).
    fn on_increment(&mut self, credit: u32) -> Result<(), PeerFault> {
        let (newly, max_outstanding) = (credit & 0xFFFF, credit >> 16);
        // The number of available credits is -1 after a pure grant beyond the limit.
        let available = self.granted.wrapping_sub(self.sent) as i32;
        // No peer can reserve more than 2^16 Receives. Beyond that, the sum would wrap.
        if available + newly as i32 > 2 * MAX_CREDITS as i32 {
            return Err(PeerFault::GrantedTooMuch { available: available.max(0) as u32, newly });
        }
        self.granted = self.granted.wrapping_add(newly);
        if newly > 0 {
            // At most `max_outstanding` messages may be outstanding, so the peer has received the others.
            self.received_by_peer = self.granted.wrapping_sub(max_outstanding);
        }
        // Until the peer raises its limit of outstanding messages, no more are usable. A limit of 0 would be a
        // deadlock.
        let usable = (available + newly as i32).min(max_outstanding.max(1) as i32);
        self.limit = self.sent.wrapping_add(usable as u32);
        Ok(())
    }

    /// Processes a version 2 ERROR. Its credit word is meaningless (version 2 §6.4.3); its count of received messages
    /// is valid.
    ///
    /// # Errors
    /// Those of [`on_receive`](Self::on_receive).
    #[cold]
    pub fn on_receive_error(&mut self, received: Option<u32>) -> Result<(), PeerFault> {
        self.count_unreadable(None)?;
        received.map_or(Ok(()), |acknowledged| self.acknowledge(acknowledged))
    }

    /// Counts an unusable message as the peer counts it. `increment` is its grant, if its credit word is readable.
    ///
    /// # Errors
    /// Those of [`on_receive`](Self::on_receive).
    #[cold]
    pub fn count_unreadable(&mut self, increment: Option<u32>) -> Result<(), PeerFault> {
        if self.credit_mode == CreditMode::V1 {
            return Ok(());
        }
        self.count(true)?;
        increment.map_or(Ok(()), |credit| self.on_increment(credit))
    }

    /// Counts one more message of version 2.
    #[inline]
    fn count(&mut self, payload: bool) -> Result<(), PeerFault> {
        self.received = self.received.wrapping_add(1);
        if (self.received.wrapping_sub(self.announced_limit) as i32) > 1 {
            return Err(self.exceeded());
        }
        match payload {
            true => self.consecutive_grants = 0,
            false => self.reported_payload = self.reported_payload.wrapping_add(1),
        }
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn exceeded(&self) -> PeerFault {
        PeerFault::CreditsExceeded { received: self.received, limit: self.announced_limit }
    }

    #[cold]
    #[inline(never)]
    fn acknowledged_too_much(&self, acknowledged: u32) -> PeerFault {
        PeerFault::AcknowledgedTooMuch { acknowledged, sent: self.sent }
    }

    /// No longer counts a message of another version, which was answered before negotiation. Its Receive is free again.
    pub fn on_version_refused(&mut self) {
        self.received = self.received.wrapping_sub(1);
    }

    /// Whether a received message is not yet reported to the peer.
    #[inline]
    pub fn has_unreported(&self) -> bool {
        self.unreported_payload() > 0
    }

    /// Received messages, other than pure grants, that are not yet reported to the peer.
    fn unreported_payload(&self) -> u32 {
        self.received.wrapping_sub(self.reported_payload)
    }

    /// Number of messages sent so far, modulo 2^32. It identifies the last one.
    pub fn sent(&self) -> u32 {
        self.sent
    }

    /// Whether the peer surely received this side's first `sent` messages (version 2). Windowed headers count them, and
    /// incremental grants imply them.
    pub fn is_received(&self, sent: u32) -> bool {
        let received = match self.credit_mode {
            CreditMode::V2Windowed => self.acknowledged,
            CreditMode::V2Incremental => self.received_by_peer,
            CreditMode::V1 => return false,
        };
        received.wrapping_sub(sent) as i32 >= 0
    }

    /// Requests a prompt report of the last message to the peer.
    pub fn report_soon(&mut self) {
        self.reported_payload = self.received.wrapping_sub(self.unreported_payload().max(self.grant_after));
    }

    /// Version 1: frees the credit of a call that ended.
    pub fn on_answered(&mut self) {
        if self.credit_mode == CreditMode::V1 {
            self.answered = self.answered.wrapping_add(1);
            self.limit = self.limit.wrapping_add(1);
        }
    }

    /// Whether a pure grant is due and allowed, if no other message carries the credits. `window` as in
    /// [`on_send`](Self::on_send).
    #[inline]
    pub fn is_grant_due(&self, window: Option<u32>) -> bool {
        let Some(window) = window else { return false };
        let remaining = self.announced_limit.wrapping_sub(self.received) as i32;
        // Pure grants use credits, too, and must be reported eventually. But a single pure grant must not cause another
        // one, or two idle peers would exchange grants without end.
        let low = match window >= self.credit_limit {
            true => self.received != self.reported && remaining <= (self.credit_limit / 2) as i32,
            false => self.is_small_grant_due(window, remaining),
        };
        (low || self.unreported_payload() >= self.grant_after) && self.may_grant() && self.credit_mode != CreditMode::V1
    }

    /// Whether a pure grant is due while the window is smaller than the credit limit. Only a peer without credits needs
    /// one, or a peer that has used its one grant beyond the limit.
    #[cold]
    fn is_small_grant_due(&self, window: u32, remaining: i32) -> bool {
        remaining < 0
            || (remaining == 0 && (window > 1 || (window == 1 && self.consecutive_grants < MAX_CONSECUTIVE_GRANTS)))
    }

    /// Whether a pure grant may be sent. It may exceed the limit by one.
    #[inline]
    pub fn may_grant(&self) -> bool {
        (self.limit.wrapping_sub(self.sent) as i32) >= 0
    }

    /// Advances the counts of this end's messages and of the peer's, to test wrap-around.
    #[cfg(test)]
    pub(crate) fn start_at(&mut self, own: u32, peers: u32) {
        let Self { sent, limit, granted, acknowledged, received_by_peer, answered, .. } = self;
        for count in [sent, limit, granted, acknowledged, received_by_peer, answered] {
            *count = count.wrapping_add(own);
        }
        for count in [&mut self.received, &mut self.announced_limit, &mut self.reported, &mut self.reported_payload] {
            *count = count.wrapping_add(peers);
        }
    }
}

/// The usable part of a window beyond [`MAX_CREDITS`]. A window beyond the range of increments is a fault.
#[cold]
fn clamp_window(credit: u32) -> Result<u32, PeerFault> {
    let fault = PeerFault::GrantedTooMuch { available: 0, newly: credit };
    if credit > 2 * MAX_CREDITS { Err(fault) } else { Ok(MAX_CREDITS) }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
