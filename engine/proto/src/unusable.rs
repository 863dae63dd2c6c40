//! Unusable messages: how each is counted and answered.

use super::calls::Match;
use super::{CallError, Connection, Event, Outgoing, PeerFault, Rejected};
use crate::wire::{ErrorBody, Version, WireError, WireErrorKind};

/// The owner of an unusable message's XID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// The peer's XID: the message is a call, or was meant as one.
    Peers,
    /// This side's XID: the message is an answer.
    Ours,
    /// No owner: it is dropped.
    Nobodys,
}

/// An unusable message.
pub(super) struct Useless {
    /// Its XID, if readable.
    pub(super) xid: Option<u32>,
    pub(super) whose: Whose,
    pub(super) kind: WireErrorKind,
    /// Its answer, if any.
    pub(super) answer: Option<ErrorBody>,
    /// Its grant in increments, still valid.
    pub(super) increment: Option<u32>,
}

impl Connection {
    /// A message that cannot be read.
    #[cold]
    pub(super) fn malformed(&mut self, error: &WireError) -> Result<Event, PeerFault> {
        let xid = error.xid().filter(|_| !error.is_too_short());
        if let WireErrorKind::UnsupportedVersion { vers } = error.kind {
            if self.must_keep_version(error.is_error()) {
                return Err(PeerFault::VersionChanged(vers));
            }
            if let (Some(xid), Some((low, high)), false) = (xid, error.version_range(), self.config.server) {
                return self.take_version_error(xid, low, high);
            }
        }
        self.session.heard_version_2 |= error.version() == Some(Version::V2) && !error.is_error();
        // Its version is readable nevertheless.
        if let (Some(xid), Some(version)) = (xid, error.version())
            && version != self.session.version()
        {
            if !self.follows(version) {
                return self.wrong_version(xid, version.code(), error.is_error());
            }
            self.go_version_1()?;
        }
        // Peers with message counts put them in each header: a lost one loses nothing.
        let increment = error.credit().filter(|_| !self.heads.windowed);
        if let (Some(xid), true) = (xid, error.is_connprop()) {
            let answer = error.answer(self.versions()).unwrap_or(ErrorBody::BadXdr);
            return self.unreadable_connprop(xid, increment, answer);
        }
        let whose = match self.session.version() {
            // An undecodable error means nothing in version 1 (RFC 8166 §4.5). One of an unknown version means nothing
            // for ours.
            _ if error.is_error() && error.version() != Some(Version::V2) => Whose::Nobodys,
            Version::V1 if !self.config.server && !error.has_reads() => Whose::Ours,
            Version::V2 if error.is_error() || error.is_response() => Whose::Ours,
            _ => Whose::Peers,
        };
        let answer = match error.answer(self.versions()) {
            // To an end that does not support operations, their bodies mean nothing (version 2 §6.2).
            Some(_) if error.is_malformed_optional() && self.exchange().is_none() => Some(ErrorBody::InvalHtype),
            answer => answer,
        };
        self.unusable(Useless { xid, whose, kind: error.kind, answer, increment })
    }

    /// Counts an unusable message: it took a Receive. It is not a part of another message.
    pub(super) fn count_unusable(&mut self, increment: Option<u32>) -> Result<(), PeerFault> {
        self.credits.count_unreadable(increment)?;
        if let Some(sequence) = self.sequences.open {
            self.break_off(sequence);
        }
        Ok(())
    }

    #[cold]
    pub(super) fn unusable(&mut self, useless: Useless) -> Result<Event, PeerFault> {
        let Useless { xid, whose, kind, answer, increment } = useless;
        self.count_unusable(increment)?;
        let (Some(xid), Some(answer)) = (xid, answer) else { return Ok(self.reject(Rejected::TooShort)) };
        match whose {
            Whose::Peers if self.config.takes_calls => {
                if self.session.version() == Version::V1 {
                    self.check_overrun()?;
                }
                Ok(match kind {
                    WireErrorKind::UnsupportedVersion { vers } => {
                        self.answer_with(Outgoing::WrongVersion { xid, vers }, answer)
                    }
                    _ => self.answer(xid, answer),
                })
            }
            // Errors never flow from requester to responder: it ends its call, if any.
            Whose::Ours => Ok(match self.calls.answered(xid) {
                Match::Call(call, token) => {
                    self.credits.on_answered();
                    self.counters.reject(&Rejected::Dropped(kind));
                    Event::Failed { call, token, error: CallError::MalformedReply(kind.name()) }
                }
                Match::Late(call) => self.late(call),
                Match::Unknown => self.reject(Rejected::Dropped(kind)),
            }),
            Whose::Peers | Whose::Nobodys => Ok(self.reject(Rejected::Dropped(kind))),
        }
    }
}
