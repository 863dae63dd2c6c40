//! The form of a message, as a pure function. Its arguments are sizes, limits and the peer's offers (version 2 §4.5 and
//! §6.5, RFC 8166 §3.5).

use super::{CallError, Knob};

/// Minimum room for a message's last part, in bytes. A rest that exceeds these two words can be split into two parts of
/// at least one word each.
pub const MIN_LAST_PART: usize = 8;

/// Limits that decide the form of a message, for one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormLimits {
    /// Longest message to send, header included.
    pub send_inline_threshold: usize,
    /// Longest message, header included, that the peer will send.
    pub receive_inline_threshold: usize,
    /// Whether messages may be continued. Only the newer revision of version 2 permits it.
    pub continuation: bool,
    /// Longest RPC message to continue instead of using a chunk, in bytes. It applies where both are possible.
    pub continue_up_to: usize,
    /// Longest RPC message reassembled from parts, in bytes. Peers are assumed to have the same limit.
    pub reassemble_up_to: usize,
    /// Whether calls of this direction may have chunks.
    pub chunks: bool,
}

/// The form of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallForm {
    /// In one message.
    Inline,
    /// In several messages, the last of which has the chunk lists.
    Continued,
    /// In a Position Zero Read chunk.
    Long,
}

/// The form of a call, and its offer for the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallPlan {
    /// The form.
    pub form: CallForm,
    /// Whether it offers a Reply chunk.
    pub reply_chunk: bool,
}

/// Bytes of a call's and its reply's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallLengths {
    /// The transport header, with the call's own chunks.
    pub header: usize,
    /// Bytes that a Reply chunk adds to the header.
    pub reply_chunk: usize,
    /// The reduced RPC message.
    pub call: usize,
    /// The reply's transport header with its returned Write chunks, in bytes.
    pub reply_header: usize,
    /// Maximum bytes of the reduced RPC reply.
    pub reply: usize,
}

/// Chooses the form of a call, and its offer for the reply.
///
/// # Errors
/// [`CallError::TooLong`] when no form can carry the call, or none its reply.
pub fn choose_call(limits: &FormLimits, lengths: &CallLengths) -> Result<CallPlan, CallError> {
    let &CallLengths { header, reply_chunk: extra, call, reply_header, reply } = lengths;
    let (limit, knob) = match limits.continuation {
        true => (limits.reassemble_up_to, Knob::REASSEMBLE_UP_TO),
        false => (limits.send_inline_threshold, Knob::RECEIVE_SIZE),
    };
    let too_long = |needed| CallError::TooLong { needed, limit, knob };
    let reply_fits = reply_header + reply <= limits.receive_inline_threshold;
    let reply_is_continued = limits.continuation && reply <= limits.continue_up_to.min(limits.reassemble_up_to);
    let prefers_reply_chunk = !reply_fits && !reply_is_continued;
    let can_reassemble = limits.continuation && reply <= limits.reassemble_up_to;
    if prefers_reply_chunk && !limits.chunks && !can_reassemble {
        return Err(too_long(reply_header + reply));
    }
    let reply_chunk = prefers_reply_chunk && limits.chunks;
    let header = header + if reply_chunk { extra } else { 0 };
    let form = if header + call <= limits.send_inline_threshold {
        CallForm::Inline
    } else if limits.continuation && call <= if limits.chunks { limits.continue_up_to } else { limits.reassemble_up_to }
    {
        CallForm::Continued
    } else if limits.chunks {
        CallForm::Long
    } else {
        return Err(too_long(header + call));
    };
    Ok(CallPlan { form, reply_chunk })
}

/// The form of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyForm {
    /// In one message.
    Inline,
    /// In the Reply chunk of its call.
    ReplyChunk,
    /// In several messages.
    Continued,
    /// No form is possible: the requester must offer more.
    TooLong,
}

/// Chooses the form of a reply.
///
/// `header` is the length of the transport header with the returned Write chunks, `reply` that of the reduced RPC
/// message, and `room` that of an offered Reply chunk.
pub fn choose_reply(limits: &FormLimits, header: usize, reply: usize, room: Option<u64>) -> ReplyForm {
    if header + reply <= limits.send_inline_threshold {
        ReplyForm::Inline
    } else if header + MIN_LAST_PART > limits.send_inline_threshold {
        ReplyForm::TooLong
    } else if room.is_some_and(|room| reply as u64 <= room) {
        // A large enough Reply chunk leaves no choice (version 2 §4.5.4).
        ReplyForm::ReplyChunk
    } else if limits.continuation {
        ReplyForm::Continued
    } else {
        ReplyForm::TooLong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: FormLimits = FormLimits {
        send_inline_threshold: 4096,
        receive_inline_threshold: 4096,
        continuation: true,
        continue_up_to: 16384,
        reassemble_up_to: 1 << 20,
        chunks: true,
    };
    const V1: FormLimits = FormLimits { continuation: false, ..V2 };

    fn call(limits: &FormLimits, call: usize, reply: usize) -> Result<(CallForm, bool), CallError> {
        let lengths = CallLengths { header: 40, reply_chunk: 20, call, reply_header: 40, reply };
        choose_call(limits, &lengths).map(|plan| (plan.form, plan.reply_chunk))
    }

    #[test]
    fn the_form_of_a_call_follows_from_its_length() {
        assert_eq!(call(&V2, 4056, 0), Ok((CallForm::Inline, false)));
        assert_eq!(call(&V2, 4057, 0), Ok((CallForm::Continued, false)));
        assert_eq!(call(&V2, 16384, 0), Ok((CallForm::Continued, false)));
        assert_eq!(call(&V2, 16385, 0), Ok((CallForm::Long, false)));
        assert_eq!(call(&V1, 4056, 0), Ok((CallForm::Inline, false)));
        assert_eq!(call(&V1, 4057, 0), Ok((CallForm::Long, false)));
    }

    #[test]
    fn a_reply_chunk_is_offered_when_no_other_form_can_carry_the_reply() {
        assert_eq!(call(&V2, 100, 4056), Ok((CallForm::Inline, false)));
        assert_eq!(call(&V2, 100, 4057), Ok((CallForm::Inline, false)), "it can be continued");
        assert_eq!(call(&V2, 100, 16385), Ok((CallForm::Inline, true)));
        assert_eq!(call(&V1, 100, 4056), Ok((CallForm::Inline, false)));
        assert_eq!(call(&V1, 100, 4057), Ok((CallForm::Inline, true)));
        assert_eq!(call(&V1, 5000, 5000), Ok((CallForm::Long, true)));
        // A reply that exceeds what this side reassembles needs a Reply chunk.
        let small = FormLimits { reassemble_up_to: 8192, ..V2 };
        assert_eq!(call(&small, 100, 8192), Ok((CallForm::Inline, false)));
        assert_eq!(call(&small, 100, 8193), Ok((CallForm::Inline, true)));
    }

    #[test]
    fn the_reply_chunk_counts_in_the_header_length() {
        assert_eq!(call(&V1, 4036, 5000), Ok((CallForm::Inline, true)));
        assert_eq!(call(&V1, 4037, 5000), Ok((CallForm::Long, true)));
        assert_eq!(call(&V1, 4037, 4056), Ok((CallForm::Inline, false)));
    }

    #[test]
    fn without_chunks_messages_are_inline_or_continued() {
        let (v1, v2) = (FormLimits { chunks: false, ..V1 }, FormLimits { chunks: false, ..V2 });
        assert!(matches!(call(&v1, 4057, 0), Err(CallError::TooLong { needed: 4097, limit: 4096, .. })));
        assert!(call(&v1, 100, 4057).is_err());
        assert_eq!(call(&v2, 1 << 20, 1 << 20), Ok((CallForm::Continued, false)));
        assert!(call(&v2, (1 << 20) + 1, 100).is_err());
        assert!(call(&v2, 100, (1 << 20) + 1).is_err());
    }

    #[test]
    fn a_reply_is_inline_or_else_in_its_chunk_or_else_in_parts() {
        assert_eq!(choose_reply(&V2, 40, 4056, Some(1 << 20)), ReplyForm::Inline);
        assert_eq!(choose_reply(&V2, 40, 4057, Some(4057)), ReplyForm::ReplyChunk);
        assert_eq!(choose_reply(&V2, 40, 4057, Some(4056)), ReplyForm::Continued);
        assert_eq!(choose_reply(&V2, 40, 4057, None), ReplyForm::Continued);
        assert_eq!(choose_reply(&V1, 40, 4057, Some(4056)), ReplyForm::TooLong);
        assert_eq!(choose_reply(&V1, 40, 4057, None), ReplyForm::TooLong);
        // Without room for the header and a last part, no form exists.
        assert_eq!(choose_reply(&V2, 4088, 9, Some(1 << 20)), ReplyForm::ReplyChunk);
        assert_eq!(choose_reply(&V2, 4089, 8, Some(1 << 20)), ReplyForm::TooLong);
        assert_eq!(choose_reply(&V2, 4089, 8, None), ReplyForm::TooLong);
    }
}
