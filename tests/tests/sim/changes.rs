//! Characteristics that shards change, or ask peers to change, while calls run.

use rpcrdma::client::LocalClient;
use rpcrdma::proto::exchange::{ChangeError, ChangeOutcome, Characteristic, CharacteristicEvent};
use rpcrdma_tests::Random;

use crate::call_checker::Link;
use crate::device::Device;
use crate::journal::Journal;

/// Minimum Receive size of version 2.
const MIN_SIZE: usize = 4096;

/// Changes a characteristic, or asks a peer to change one.
pub(crate) fn make_change(client: &mut LocalClient<Device>, links: &[Link], random: &mut Random, journal: &Journal) {
    if random.once_in(2) {
        return resize(client, random, journal);
    }
    let open: Vec<_> = links.iter().filter(|link| client.is_established(link.connection)).collect();
    if open.is_empty() {
        return;
    }
    let connection = open[random.below(open.len())].connection;
    let result = match random.below(3) {
        0 => client.set_remote_invalidation(connection, random.once_in(2)),
        _ => {
            let max = max_size(client);
            let mut wanted = vec![
                Characteristic::ReceiveSize(draw_size(random, max) as u32),
                Characteristic::SendSize(4 * (200 + random.below(max / 4)) as u32),
                Characteristic::RemoteInvalidation(random.once_in(2)),
                Characteristic::SegmentCount(1 + random.below(9) as u32),
            ];
            wanted.retain(|_| random.once_in(2));
            client.request_change(connection, &wanted)
        }
    };
    journal.note(format_args!("requests a change: {result:?}"));
    match result {
        Ok(()) => journal.count("changes requested", 1),
        Err(ChangeError::Unsupported) => journal.count("change requests to peers without support", 1),
        Err(_) => {}
    }
}

/// Maximum Receive size that the configuration allows.
fn max_size(client: &LocalClient<Device>) -> usize {
    let config = client.config();
    config.wire.receive_size.max(config.debug.max_receive_size)
}

/// Draws a Receive size from the minimum to slightly more than the maximum.
fn draw_size(random: &mut Random, max: usize) -> usize {
    MIN_SIZE + 4 * random.below((max.saturating_sub(MIN_SIZE) / 4).max(1) + 40)
}

/// Changes the Receive size of this shard. Checks that the engine accepts only a valid size, and one change at a time.
fn resize(client: &mut LocalClient<Device>, random: &mut Random, journal: &Journal) {
    let max = max_size(client);
    let bytes = draw_size(random, max);
    let stats = client.stats();
    let is_changing = stats.receive_size != stats.receive_size_posted;
    let result = client.change_receive_size(bytes);
    journal.note(format_args!("Receives of {bytes}: {result:?}"));
    let participant = journal.participant();
    match result {
        Ok(()) => {
            assert!(
                (MIN_SIZE..=max).contains(&bytes) && !is_changing,
                "{participant}: change to {bytes} must be rejected"
            );
            journal.count("Receive sizes increased", u64::from(bytes > stats.receive_size));
            journal.count("Receive sizes reduced", u64::from(bytes < stats.receive_size));
        }
        Err(error) if error.is_busy() => assert!(is_changing, "{participant}: busy requires an unfinished change"),
        Err(error) => assert!(!(MIN_SIZE..=max).contains(&bytes), "{participant}: {error}"),
    }
}

/// Counts the peers' changes and their answers to requests.
pub(crate) fn count_events(client: &mut LocalClient<Device>, journal: &Journal) {
    for (connection, event) in client.take_changes() {
        journal.note(format_args!("{connection:?}: {event:?}"));
        let name = match event {
            CharacteristicEvent::Peer(Characteristic::ReceiveSize(_)) => "peers' Receive sizes changed",
            CharacteristicEvent::Answer { outcome: ChangeOutcome::Done, .. } => "changes done",
            CharacteristicEvent::Answer { outcome: ChangeOutcome::Pending, .. } => "changes pending",
            CharacteristicEvent::Answer { outcome: ChangeOutcome::Rejected, .. } => "changes rejected",
            CharacteristicEvent::Answer { outcome: ChangeOutcome::Partial(_), .. } => "changes done in part",
            _ => continue,
        };
        journal.count(name, 1);
    }
}
