//! Negotiation: the protocol version and its terms.
//!
//! A client that prefers version 2 starts with a CONNPROP. It sends nothing else until the answer (version 2 §4.3.3). A
//! server follows the version of the first message that it can read. Version 1 takes the terms from the private data of
//! the connect messages (RFC 8797). Version 2 takes them from the CONNPROPs, or its defaults.

use super::form::FormLimits;
use super::unusable::{Useless, Whose};
use super::{ConnConfig, Connection, CreditMode, Event, Outgoing, PeerFault};
use crate::wire::private_data::{self, PrivateData};
use crate::wire::properties::{Properties, ReverseSupport};
use crate::wire::{ErrorBody, HeaderType, Revision, Version, View, ViewBody, WireErrorKind};

/// Longest first message of a client, in bytes. Every version 1 receiver has this room (version 2 §4.3.3).
pub const FIRST_MESSAGE_LEN: usize = 1024;

/// The phase of a connection's negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not negotiated. A client has sent its CONNPROP, or will; a server waits for a message.
    Hello,
    /// The version is negotiated, permanently.
    Settled,
}

/// The negotiated state of a connection.
#[derive(Debug)]
pub(super) struct Session {
    version: Version,
    pub(super) phase: Phase,
    /// Whether a client has received a message of version 2 other than ERR_VERS.
    pub(super) heard_version_2: bool,
    /// The server's error about a client's first message, other than ERR_VERS.
    pub(super) first_error: Option<ErrorBody>,
    /// Whether a client may call.
    pub(super) open: bool,
    /// Whether calls of the peer are served: configured, and the peer authenticated.
    pub(super) serves: bool,
    pub(super) terms: Terms,
}

impl Session {
    /// It starts with the version that the configuration prefers.
    pub(super) fn new(config: &ConnConfig) -> Self {
        let (version, terms) = match config.scheme {
            CreditMode::V1 => (Version::V1, Terms::version_1(config)),
            CreditMode::V2Windowed | CreditMode::V2Incremental => (Version::V2, Terms::version_2(config)),
        };
        let (heard_version_2, first_error) = (false, None);
        Self { version, phase: Phase::Hello, heard_version_2, first_error, open: false, serves: false, terms }
    }

    #[inline]
    pub(super) fn version(&self) -> Version {
        self.version
    }

    /// Settles on version 1, permanently.
    pub(super) fn go_version_1(&mut self, config: &ConnConfig) {
        (self.version, self.phase, self.open) = (Version::V1, Phase::Settled, !config.server);
        self.terms = Terms::version_1(config);
    }
}

impl Connection {
    /// Selects the version by a server's first readable message.
    pub(super) fn settle_server(&mut self, version: Version, introduce: bool) {
        if self.config.server && self.session.phase == Phase::Hello {
            self.session.phase = Phase::Settled;
            if version == Version::V2 && introduce {
                self.introduce();
            }
        }
    }

    /// Whether a server accepts a version 1 first message despite its preference.
    pub(super) fn follows(&self, vers: Version) -> bool {
        self.config.server && self.session.phase == Phase::Hello && vers == Version::V1 && self.config.version_1
    }

    /// Version 1 cannot authenticate: policy decides.
    pub(super) fn go_version_1(&mut self) -> Result<(), PeerFault> {
        self.authenticate(None)?;
        self.session.go_version_1(&self.config);
        self.credits = self.config.new_credits(Version::V1);
        self.heads.expect(None);
        self.outbox.ping = false;
        self.outbox.forget(Outgoing::Connprop);
        Ok(())
    }

    /// Handles a server's error that lists its supported versions.
    #[cold]
    pub(super) fn take_version_error(&mut self, xid: u32, low: u32, high: u32) -> Result<Event, PeerFault> {
        // The common layout of all versions has no credits.
        self.credits.count_unreadable(None)?;
        if self.config.server || self.session.phase == Phase::Settled {
            let event = self.failed_by(xid, ErrorBody::Vers { low, high });
            if matches!(event, Event::Failed { .. } | Event::Late { .. }) {
                self.credits.on_answered();
            }
            return Ok(event);
        }
        if !self.config.version_1 || !(low..=high).contains(&Version::V1.code()) {
            return Err(PeerFault::NoCommonVersion { low, high });
        }
        self.go_version_1()?;
        Ok(Event::Settled)
    }

    /// Whether another version in this message ends the connection (version 2 §4.3.3). A client of version 1 drops it
    /// (RFC 8166 §4.5), and each client an error.
    pub(super) fn must_keep_version(&self, error: bool) -> bool {
        let strict = self.config.server || (self.session.version() == Version::V2 && !error);
        strict && self.session.phase == Phase::Settled
    }

    #[cold]
    pub(super) fn other_version(&mut self, view: &View<'_>) -> Result<Event, PeerFault> {
        let vers = view.version();
        // An ERR_VERS may have the version number of its sender.
        if let (ViewBody::Error(ErrorBody::Vers { low, high }), false) = (view.body(), self.config.server) {
            return self.take_version_error(view.xid(), low, high);
        }
        if self.follows(vers) {
            self.go_version_1()?;
            return self.receive_v1(view);
        }
        self.wrong_version(view.xid(), vers.code(), view.htype() == HeaderType::Error)
    }

    #[cold]
    pub(super) fn wrong_version(&mut self, xid: u32, vers: u32, error: bool) -> Result<Event, PeerFault> {
        if self.must_keep_version(error) {
            return Err(PeerFault::VersionChanged(vers));
        }
        let whose = match self.session.version() {
            _ if error => Whose::Nobodys,
            Version::V1 if !self.config.server => Whose::Ours,
            _ => Whose::Peers,
        };
        let kind = WireErrorKind::UnsupportedVersion { vers };
        let answer = Some(self.version_error());
        self.unusable(Useless { xid: Some(xid), whose, kind, answer, increment: None })
    }

    /// Versions of this end.
    pub(super) fn versions(&self) -> (Version, Version) {
        let low = if self.config.version_1 { Version::V1 } else { Version::V2 };
        match self.config.scheme {
            CreditMode::V1 => (Version::V1, Version::V1),
            CreditMode::V2Windowed | CreditMode::V2Incremental => (low, Version::V2),
        }
    }

    pub(super) fn version_error(&self) -> ErrorBody {
        let (low, high) = self.versions();
        ErrorBody::Vers { low: low.code(), high: high.code() }
    }
}

/// The terms of a connection: limits of either side's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Protocol version.
    pub version: Version,
    /// Longest message to send, in bytes: own limit or the peer's Receives.
    pub send_inline_threshold: usize,
    /// Longest message that the peer will send, in bytes.
    pub receive_inline_threshold: usize,
    /// Longest segment that the peer handles, in bytes.
    pub segment_size: u32,
    /// Most segments in one header that the peer handles.
    pub segment_count: u32,
    /// The peer's support for reverse-direction calls, if this side is the server.
    pub reverse: ReverseSupport,
    /// Whether this side's replies may be sent with invalidation. In version 2 each call states it.
    pub remote_invalidation: bool,
    /// Whether the peer offered windowed credits.
    pub windowed: bool,
    /// Whether the peer supports OPTIONAL headers.
    pub optional: bool,
}

impl Terms {
    /// The terms of version 2 before, or without, a CONNPROP.
    pub(super) fn version_2(config: &ConnConfig) -> Self {
        Self::from_properties(config, &Properties::default())
    }

    /// The terms from the peer's CONNPROP.
    pub(super) fn from_properties(config: &ConnConfig, peer: &Properties<'_>) -> Self {
        Self {
            version: Version::V2,
            // A peer whose Receives are too small even for a first message is at fault itself.
            send_inline_threshold: config.longest_send.min((peer.receive_size as usize).max(FIRST_MESSAGE_LEN)),
            receive_inline_threshold: config.receive_size.min((peer.send_size as usize).max(FIRST_MESSAGE_LEN)),
            segment_size: peer.segment_size.max(1),
            segment_count: peer.segment_count.max(1),
            reverse: peer.reverse_support,
            remote_invalidation: config.remote_invalidation,
            windowed: peer.windowed_credits,
            optional: peer.optional_type,
        }
    }

    /// The terms after changes of either end.
    pub(super) fn changed(self, config: &ConnConfig, local: &Properties<'_>, peer: &Properties<'_>) -> Self {
        let ours = ConnConfig {
            longest_send: config.longest_send.min((local.send_size as usize).max(FIRST_MESSAGE_LEN)),
            receive_size: local.receive_size as usize,
            ..config.clone()
        };
        let (windowed, optional) = (self.windowed, self.optional);
        let remote_invalidation = config.remote_invalidation && peer.remote_invalidation;
        Self { windowed, optional, remote_invalidation, ..Self::from_properties(&ours, peer) }
    }

    /// Version 1: terms from the peer's private data, or its absence.
    pub(super) fn version_1(config: &ConnConfig) -> Self {
        // RFC 8166 §3.3.2: without private data, both thresholds are 1024 bytes.
        let peer = config.private_data.unwrap_or_default();
        // Announced sizes of both directions are multiples of 1024.
        let said = (config.receive_size & !1023).min(private_data::MAX_INLINE_THRESHOLD as usize);
        Self {
            version: Version::V1,
            send_inline_threshold: said.min(peer.receive_size as usize),
            receive_inline_threshold: said.min(peer.send_size as usize),
            segment_size: u32::MAX,
            segment_count: 16,
            reverse: ReverseSupport::Inline,
            remote_invalidation: config.remote_invalidation && peer.remote_invalidation,
            windowed: false,
            optional: false,
        }
    }

    /// Limits that decide the form of this side's messages.
    #[doc(hidden)]
    pub fn form_limits(&self, config: &ConnConfig) -> FormLimits {
        FormLimits {
            send_inline_threshold: self.send_inline_threshold,
            receive_inline_threshold: self.receive_inline_threshold,
            continuation: self.version == Version::V2 && config.revision == Revision::Ietf00,
            continue_up_to: config.continue_up_to,
            reassemble_up_to: config.reassemble_up_to,
            // In the reverse direction the peer may not be ready for chunks.
            chunks: !config.server || self.reverse == ReverseSupport::General,
        }
    }
}

/// This side's properties.
pub(super) fn properties(config: &ConnConfig) -> Properties<'static> {
    let optional_type = config.optional();
    Properties {
        send_size: config.longest_send as u32,
        receive_size: config.receive_size as u32,
        segment_size: config.segment_size,
        segment_count: config.segment_count,
        reverse_support: config.reverse,
        host_auth: None,
        windowed_credits: config.scheme == CreditMode::V2Windowed,
        optional_type,
        // Without the operations, each call states its own invalidation handle.
        remote_invalidation: optional_type && config.remote_invalidation,
    }
}

/// The private data of this side's connect message.
pub fn connect_data(receive_size: usize, remote_invalidation: bool) -> [u8; private_data::LEN] {
    let data = PrivateData { remote_invalidation, send_size: receive_size as u32, receive_size: receive_size as u32 };
    let mut bytes = [0; private_data::LEN];
    // As long as the message is.
    let _ = data.emit(&mut bytes);
    bytes
}
