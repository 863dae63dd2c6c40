//! Negotiation: the protocol version and its terms.
//!
//! A client that prefers version 2 starts with a CONNPROP. It sends nothing else until the answer (version 2 §4.3.3). A
//! server follows the version of the first message that it can read. Version 1 takes the terms from the private data of
//! the connect messages (RFC 8797). Version 2 takes them from the CONNPROPs, or its defaults.

use super::connprop::Connprop;
use super::form::FormLimits;
use super::{ConnConfig, CreditMode};
use crate::auth::{AuthError, HostAuth};
use crate::wire::private_data::{self, PrivateData};
use crate::wire::properties::{Properties, ReverseSupport};
use crate::wire::{ErrorBody, Revision, Version, ViewBody};

/// Longest first message of a client, in bytes. Every version 1 receiver has this room (version 2 §4.3.3).
pub const FIRST_MESSAGE_LEN: usize = 1024;

/// The phase of a connection's negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not negotiated. A client has sent its CONNPROP, or will; a server waits for a message.
    Hello,
    /// The version is negotiated, permanently.
    Negotiated,
}

/// The negotiated state of a connection.
#[derive(Debug)]
pub struct Session {
    version: Version,
    phase: Phase,
    server: bool,
    /// Whether a client has received a message of version 2 other than ERR_VERS.
    pub(super) received_version_2: bool,
    /// Whether a client may call.
    open: bool,
    /// Whether calls of the peer are served: configured, and the peer authenticated.
    pub(super) serves: bool,
    /// Terms of this side's messages, as negotiated so far.
    pub(super) terms: ConnectionTerms,
    /// The server's error about a client's first message, other than ERR_VERS.
    first_error: Option<ErrorBody>,
    pub(super) connprop: Box<Connprop>,
}

impl Session {
    /// Starts with the version that the configuration prefers.
    pub(super) fn new(config: &ConnConfig) -> Self {
        let (version, terms) = match config.credit_mode {
            CreditMode::V1 => (Version::V1, ConnectionTerms::version_1(config)),
            CreditMode::V2Windowed | CreditMode::V2Incremental => {
                (Version::V2, ConnectionTerms::from_properties(config, &Properties::default()))
            }
        };
        let mut session = Self {
            version,
            phase: Phase::Hello,
            server: config.server,
            received_version_2: false,
            open: false,
            serves: false,
            terms,
            first_error: None,
            connprop: Box::new(Connprop::new(config)),
        };
        if version == Version::V1 {
            // Version 1 negotiates nothing, and cannot authenticate. The owner finds a failure in `auth`.
            let _ = session.connprop.auth.receive(None);
            if !config.server {
                session.finish_negotiation();
                session.open = session.auth().permits_calls();
            }
        }
        session.serves = config.accepts_calls && session.auth().permits_calls();
        session
    }

    /// The version of this side's messages.
    #[inline]
    pub fn version(&self) -> Version {
        self.version
    }

    /// State of the version negotiation.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Authentication of the peer. If it has already [failed](HostAuth::failure), the connection must end.
    pub fn auth(&self) -> &HostAuth {
        &self.connprop.auth
    }

    /// Whether a client may call: negotiation and authentication are complete.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Whether version and authentication let this side call.
    pub fn may_call(&self) -> bool {
        self.phase == Phase::Negotiated && self.auth().permits_calls() && (self.open || self.server)
    }

    /// Whether a client has received a message of version 2 other than ERR_VERS: its server supports that version.
    pub fn has_received_version_2(&self) -> bool {
        self.received_version_2
    }

    /// The server's error about a client's first message, other than ERR_VERS, if no other message followed.
    pub fn first_error(&self) -> Option<ErrorBody> {
        self.first_error.filter(|_| self.phase == Phase::Hello)
    }

    /// Makes the current version permanent.
    pub(super) fn finish_negotiation(&mut self) {
        self.phase = Phase::Negotiated;
    }

    /// Selects version 1 permanently.
    pub(super) fn fall_back_to_version_1(&mut self, config: &ConnConfig) {
        self.finish_negotiation();
        (self.version, self.open) = (Version::V1, !config.server);
        self.terms = ConnectionTerms::version_1(config);
    }

    /// Handles the body of a version 2 message. Any body except an error makes the version permanent.
    pub(super) fn handle_body(&mut self, body: &ViewBody<'_>) {
        match body {
            ViewBody::Error(error) if self.phase == Phase::Hello => self.first_error = Some(*error),
            ViewBody::Error(_) => {}
            _ => self.finish_negotiation(),
        }
    }

    /// Opens a client's session if negotiation and authentication are complete. Returns true once.
    pub(super) fn open_client(&mut self) -> bool {
        let is_complete = self.phase == Phase::Negotiated && !self.auth().in_progress() && self.auth().permits_calls();
        let opens = is_complete && !self.open && !self.server;
        self.open |= opens;
        opens
    }

    /// Advances authentication by a message; `None` if the peer sent none. A server answers a failure, too.
    pub(super) fn authenticate(&mut self, config: &ConnConfig, message: Option<&[u8]>) -> Result<(), AuthError> {
        let (answer, result) = match self.connprop.auth.receive(message) {
            Ok(answer) => (answer, Ok(())),
            Err(error) => (config.server.then(Vec::new), Err(error)),
        };
        self.connprop.message = answer.or(self.connprop.message.take());
        self.serves = config.accepts_calls && self.auth().permits_calls();
        result
    }
}

/// The terms of a connection: limits of either side's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionTerms {
    /// Protocol version.
    pub version: Version,
    /// Longest message to send, in bytes: the smaller of this side's limit and the peer's Receive size.
    pub send_inline_threshold: usize,
    /// Longest message that the peer will send, in bytes.
    pub receive_inline_threshold: usize,
    /// Longest segment that the peer handles, in bytes.
    pub segment_size: u32,
    /// Maximum segments in one header that the peer handles.
    pub segment_count: u32,
    /// The peer's support for reverse-direction calls, if this side is the server.
    pub reverse: ReverseSupport,
    /// Whether this side's replies may be sent with invalidation. In version 2 each call states it.
    pub remote_invalidation: bool,
    /// Whether the peer offered windowed credits.
    pub windowed: bool,
    /// Whether the peer supports OPTIONAL headers.
    pub optional: bool,
    /// Whether calls of this side offer a handle for invalidation.
    pub offers_invalidation: bool,
}

impl ConnectionTerms {
    /// The terms of version 2 from the peer's CONNPROP, or the defaults of version 2 without one.
    pub(super) fn from_properties(config: &ConnConfig, peer: &Properties<'_>) -> Self {
        Self {
            version: Version::V2,
            // Receives that are too small even for a first message are the peer's fault.
            send_inline_threshold: config.longest_send.min((peer.receive_size as usize).max(FIRST_MESSAGE_LEN)),
            receive_inline_threshold: config.receive_size.min((peer.send_size as usize).max(FIRST_MESSAGE_LEN)),
            segment_size: peer.segment_size.max(1),
            segment_count: peer.segment_count.max(1),
            reverse: peer.reverse_support,
            remote_invalidation: config.remote_invalidation,
            windowed: peer.windowed_credits,
            optional: peer.optional_type,
            offers_invalidation: config.remote_invalidation,
        }
    }

    /// The terms after changes of either end.
    pub(super) fn after_changes(self, config: &ConnConfig, local: &Properties<'_>, peer: &Properties<'_>) -> Self {
        let changed_config = ConnConfig {
            longest_send: config.longest_send.min((local.send_size as usize).max(FIRST_MESSAGE_LEN)),
            receive_size: local.receive_size as usize,
            ..config.clone()
        };
        Self {
            windowed: self.windowed,
            optional: self.optional,
            remote_invalidation: config.remote_invalidation && peer.remote_invalidation,
            offers_invalidation: local.remote_invalidation,
            ..Self::from_properties(&changed_config, peer)
        }
    }

    /// The terms of version 1 from the peer's private data, or the defaults without it.
    pub(super) fn version_1(config: &ConnConfig) -> Self {
        // RFC 8166 §3.3.2: without private data, both thresholds are 1024 bytes.
        let peer = config.private_data.unwrap_or_default();
        // Announced sizes of both directions are multiples of 1024.
        let own_size = (config.receive_size & !1023).min(private_data::MAX_INLINE_THRESHOLD as usize);
        Self {
            version: Version::V1,
            send_inline_threshold: own_size.min(peer.receive_size as usize),
            receive_inline_threshold: own_size.min(peer.send_size as usize),
            segment_size: u32::MAX,
            segment_count: 16,
            reverse: ReverseSupport::Inline,
            remote_invalidation: config.remote_invalidation && peer.remote_invalidation,
            windowed: false,
            optional: false,
            offers_invalidation: config.remote_invalidation,
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
    let optional_type = config.offers_changes();
    Properties {
        send_size: config.longest_send as u32,
        receive_size: config.receive_size as u32,
        segment_size: config.segment_size,
        segment_count: config.segment_count,
        reverse_support: config.reverse,
        host_auth: None,
        windowed_credits: config.credit_mode == CreditMode::V2Windowed,
        optional_type,
        // Without operations on characteristics, each call states its own invalidation handle.
        remote_invalidation: optional_type && config.remote_invalidation,
    }
}

/// The private data of this side's connect message.
pub fn connect_data(receive_size: usize, remote_invalidation: bool) -> [u8; private_data::LEN] {
    let data = PrivateData { remote_invalidation, send_size: receive_size as u32, receive_size: receive_size as u32 };
    let mut bytes = [0; private_data::LEN];
    // The buffer has the length of the message.
    let _ = data.emit(&mut bytes);
    bytes
}
