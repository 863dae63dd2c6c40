//! Characteristics that shards change, or ask peers to change, while calls run.

use rpcrdma::client::LocalClient;
use rpcrdma::proto::exchange::{ChangeError, ChangeOutcome, Characteristic, CharacteristicEvent};
use rpcrdma_tests::Random;

use crate::call_checker::Link;
use crate::device::Device;
use crate::journal::Journal;

/// Smallest Receives of version 2.
const LEAST: usize = 4096;

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
    let made = match random.below(3) {
        0 => client.set_remote_invalidation(connection, random.once_in(2)),
        _ => {
            let most = longest(client);
            let mut wanted = vec![
                Characteristic::ReceiveSize(any_size(random, most) as u32),
                Characteristic::SendSize(4 * (200 + random.below(most / 4)) as u32),
                Characteristic::RemoteInvalidation(random.once_in(2)),
                Characteristic::SegmentCount(1 + random.below(9) as u32),
            ];
            wanted.retain(|_| random.once_in(2));
            client.request_change(connection, &wanted)
        }
    };
    journal.note(format_args!("asks for a change: {made:?}"));
    match made {
        Ok(()) => journal.count("changes asked for", 1),
        Err(ChangeError::Unsupported) => journal.count("peers that take no changes", 1),
        Err(_) => {}
    }
}

fn longest(client: &LocalClient<Device>) -> usize {
    let config = client.config();
    config.wire.receive_size.max(config.debug.max_receive_size)
}

/// Draws a size, usually an acceptable one.
fn any_size(random: &mut Random, most: usize) -> usize {
    LEAST + 4 * random.below((most.saturating_sub(LEAST) / 4).max(1) + 40)
}

fn resize(client: &mut LocalClient<Device>, random: &mut Random, journal: &Journal) {
    let most = longest(client);
    let bytes = any_size(random, most);
    let stats = client.stats();
    let changes = stats.receive_size != stats.receive_size_posted;
    let result = client.change_receive_size(bytes);
    journal.note(format_args!("Receives of {bytes}: {result:?}"));
    let who = journal.who();
    match result {
        Ok(()) => {
            assert!((LEAST..=most).contains(&bytes) && !changes, "{who}: it takes {bytes}");
            journal.count("Receives that grow", u64::from(bytes > stats.receive_size));
            journal.count("Receives that shrink", u64::from(bytes < stats.receive_size));
        }
        Err(error) if error.is_busy() => assert!(changes, "{who}: nothing changes"),
        Err(error) => assert!(!(LEAST..=most).contains(&bytes), "{who}: {error}"),
    }
}

/// Counts the peers' changes and their answers to requests.
pub(crate) fn count_events(client: &mut LocalClient<Device>, journal: &Journal) {
    for (connection, event) in client.take_changes() {
        journal.note(format_args!("{connection:?}: {event:?}"));
        let what = match event {
            CharacteristicEvent::Peer(Characteristic::ReceiveSize(_)) => "peers' Receives of another size",
            CharacteristicEvent::Answer { outcome: ChangeOutcome::Done, .. } => "changes that are made",
            CharacteristicEvent::Answer { outcome: ChangeOutcome::Pending, .. } => "changes that are pending",
            CharacteristicEvent::Answer { outcome: ChangeOutcome::Rejected, .. } => "changes that are rejected",
            CharacteristicEvent::Answer { outcome: ChangeOutcome::Partial(_), .. } => "changes of another kind",
            _ => continue,
        };
        journal.count(what, 1);
    }
}
