//! Meaning of a version 1 message (RFC 8166, RFC 8167).

use super::incoming::HasLists;
use super::{Connection, CreditWords, Event, PeerFault, Phase, Rejected};
use crate::wire::{ErrorBody, HeadLayout, HeaderType, Version, View};

impl Connection {
    pub(super) fn receive_v1(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        let response = self.answers_in_v1(view);
        let event = match view.htype() {
            HeaderType::Msg | HeaderType::Nomsg => {
                self.take_v1(view.xid(), view.credit(), response, HasLists::of(view))
            }
            _ if response => self.receive_v1_error(view),
            _ => self.reject_v1(view),
        };
        if self.session.phase == Phase::Settled {
            self.heads.expect(Some(HeadLayout::V1));
        }
        event
    }

    /// A call or reply of version 1. The credits of a call are a request, which this side grants as it sees fit. Only
    /// the calls under way count.
    #[inline]
    pub(super) fn take_v1(
        &mut self,
        xid: u32,
        credit: u32,
        response: bool,
        lists: Option<HasLists>,
    ) -> Result<Event, PeerFault> {
        if response {
            let event = self.replied(xid, lists);
            self.credit_v1(&event, credit)?;
            return Ok(event);
        }
        if !self.config.takes_calls {
            return Ok(self.reject(Rejected::Unexpected));
        }
        self.settle_server(Version::V1, false);
        self.check_overrun()?;
        self.called(xid, lists)
    }

    /// Whether a version 1 message has an XID of this side. The header does not show it.
    pub(super) fn answers_in_v1(&self, view: &View<'_>) -> bool {
        match view.htype() {
            HeaderType::Error => true,
            // The RPC message shows it, if it is inline (RFC 8167 §5).
            HeaderType::Msg if view.payload().len() >= 8 => view.payload()[4..8] == 1u32.to_be_bytes(),
            // Replies have no Read list, and long calls are in one. A server offers no Reply chunk here, so it expects
            // no long reply. A message like one concerns the call that it names, if that is under way.
            HeaderType::Msg => !self.config.server && view.reads().next().is_none(),
            HeaderType::Nomsg => {
                view.reads().next().is_none() && (!self.config.server || self.calls.is_sent(view.xid()))
            }
            _ => !self.config.server,
        }
    }

    /// Rejects a requester's message that is neither a call nor a reply.
    #[cold]
    pub(super) fn reject_v1(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        if !self.config.takes_calls {
            return Ok(self.reject(Rejected::Unexpected));
        }
        self.settle_server(Version::V1, false);
        self.check_overrun()?;
        match view.htype() {
            // Dropped silently, as deployed servers do.
            HeaderType::Done => Ok(self.reject(Rejected::Unexpected)),
            _ => Ok(self.answer(view.xid(), ErrorBody::BadXdr)),
        }
    }

    #[cold]
    pub(super) fn receive_v1_error(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        let event = match view.htype() {
            HeaderType::Error => self.failed(view),
            _ => self.reject(Rejected::Unexpected),
        };
        self.credit_v1(&event, view.credit())?;
        Ok(event)
    }

    /// Applies the credit word of an answer with this event.
    #[inline(always)]
    pub(super) fn credit_v1(&mut self, event: &Event, credit: u32) -> Result<(), PeerFault> {
        match event {
            Event::Reply { .. } | Event::Failed { .. } | Event::Retryable { .. } | Event::Late { .. } => {
                self.credits.on_answered();
                self.credits.on_receive(CreditWords { credit, received: None }, true)
            }
            // A message that answers no call of ours grants nothing.
            _ => Ok(()),
        }
    }

    /// Checks version 1's calls under way against the [tolerated](super::Credits::tolerated) number.
    #[inline]
    pub(super) fn check_overrun(&self) -> Result<(), PeerFault> {
        let limit = self.credits.tolerated() + 1;
        let under_way = self.inbound.len() + self.outbox.errors();
        if under_way >= limit as usize { Err(PeerFault::TooManyCalls { limit }) } else { Ok(()) }
    }
}
