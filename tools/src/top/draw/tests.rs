use ratatui::Terminal;
use ratatui::backend::TestBackend;
use rpcrdma::stats::{ConnectionStats, ShardStats};

use super::*;
use crate::top::model::{ConnectionRow, Figure, PoolLow, ProcedureRow, ShardRow};

fn figure(now: f64) -> Option<Figure> {
    Some(Figure { now, min: now / 2.0, max: now * 2.0 })
}

fn view(shards: u32) -> View {
    let shard = |shard| ShardRow {
        shard,
        address: "verbs:192.0.2.1:20049".to_owned(),
        answered: shard != 1,
        busy: figure(0.42),
        calls: figure(1_234_567.0),
        p50: figure(1_900.0),
        p99: figure(12_345.0),
        credits_used: 12,
        credits_granted: 256,
        receives_lowest: 64,
        worker_queue_depth: 3,
        memory_waits: figure(77.0),
        read_waits: figure(33.0),
        pool_low: Some(PoolLow { size: 65536, low_water: 2, count: 32 }),
        faults_total: 5,
        ..ShardRow::default()
    };
    let mut peer = ConnectionStats::default();
    (peer.peer, peer.version, peer.credits_granted) = ("pid 4242 uid 0\u{1b}[31m".to_owned(), 2, 128);
    View {
        pid: 4711,
        uptime: 3_720_000_000_000,
        interval: 1_000_000_000,
        shards: (0..shards).map(shard).collect(),
        procedures: vec![ProcedureRow {
            program: 100_003,
            version: 3,
            procedure: 6,
            timed: figure(99.0),
            ..Default::default()
        }],
        connections: vec![ConnectionRow { shard: 0, now: peer, messages: figure(512.0) }],
        connections_omitted: 488,
    }
}

fn screen(tab: Tab) -> Screen {
    Screen { view: Some(view(2)), interval: Duration::from_secs(1), tab, ..Screen::default() }
}

/// Draws the screen in a terminal of this size. Returns its lines.
fn drawn(screen: &Screen, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| screen.draw(frame)).expect("it is drawn");
    let buffer = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| line(y).trim_end().to_owned()).collect()
}

/// Checks that all of these texts are visible.
fn assert_shows(lines: &[String], wanted: &[&str]) {
    for text in wanted {
        assert!(lines.iter().any(|line| line.contains(text)), "{text:?} is missing:\n{}", lines.join("\n"));
    }
}

#[test]
fn a_screen_of_40_columns_shows_the_main_figures() {
    let lines = drawn(&screen(Tab::Shards), 40, 24);
    assert_shows(
        &lines,
        &["shard  busy calls/s    p50    p99", "    0   42%   1.23M 1.90µs 12.3µs", "pid 4711  up 1h02m", "2 shards"],
    );
    // Details of the selected shard follow as far as they fit.
    assert_shows(
        &lines,
        &["busy turns         42%     21%     84%", "credits        12 used of 256", "mem. waits/s        77"],
    );
    assert!(lines.iter().all(|line| line.chars().count() <= 40), "{lines:#?}");
    assert_shows(&drawn(&screen(Tab::Procedures), 40, 24), &["100003 v3        6      99", "1 procedures"]);
    assert_shows(&drawn(&screen(Tab::Connections), 40, 24), &["pid 4242 uid 0", "512", "and 488 more"]);
}

#[test]
fn a_screen_of_80_columns_shows_all_details_of_a_shard() {
    let lines = drawn(&screen(Tab::Shards), 80, 24);
    assert_shows(
        &lines,
        &["faults waits/s queue     credits", "     5      77     3      12/256", "1 procedures", "1 connections"],
    );
    assert_shows(
        &lines,
        &["  lowest       64", "pool lowest    2/32 of 64.0KB", "worker queue   3", "faults         5"],
    );
    assert_shows(&lines, &["q: quit"]);
}

#[test]
fn a_screen_of_200_columns_shows_all_columns() {
    let lines = drawn(&screen(Tab::Shards), 200, 12);
    assert_shows(
        &lines,
        &[
            "lowest    pool low rwaits/s min c/s max c/s core address",
            "64        2/32       33    617k   2.47M    - verbs:192.0.2.1:20049",
        ],
    );
    assert_shows(&drawn(&screen(Tab::Connections), 200, 12), &["pid 4242 uid 0?[31", "identity"]);
}

#[test]
fn a_shard_that_did_not_answer_is_marked() {
    assert_shows(&drawn(&screen(Tab::Shards), 40, 24), &["   1?"]);
}

#[test]
fn an_unreachable_server_is_marked_and_its_last_figures_stay() {
    let mut screen = screen(Tab::Shards);
    screen.error = Some("/run/stats: Connection refused".to_owned());
    let lines = drawn(&screen, 80, 24);
    assert!(lines[0].starts_with("no snapshot: /run/stats: Connection refused; retrying"), "{}", lines[0]);
    assert_shows(&lines, &["1.23M"]);
    screen.show(view(1));
    assert!(drawn(&screen, 80, 24)[0].contains("pid 4711"));
    assert_shows(&drawn(&Screen::default(), 80, 24), &["waiting for the first snapshot"]);
}

#[test]
fn every_screen_size_is_drawn_with_the_selected_row_visible() {
    for tab in Tab::ALL {
        for (width, height) in [(1, 1), (2, 3), (5, 2), (40, 4), (39, 6), (300, 100)] {
            drawn(&screen(tab), width, height);
        }
    }
    let mut screen = Screen { view: Some(view(60)), ..screen(Tab::Shards) };
    screen.move_selection(1000);
    assert_eq!(screen.selected, 59);
    assert_shows(&drawn(&screen, 80, 20), &["   59   42%", "shard 59"]);
    screen.show(view(3));
    assert_eq!(screen.selected, 2, "the selection stays within the rows");
    screen.move_selection(-7);
    assert_eq!(screen.selected, 0);
}

#[test]
fn without_colours_no_cell_is_coloured() {
    let colours = |screen: &Screen| {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("a terminal");
        terminal.draw(|frame| screen.draw(frame)).expect("it is drawn");
        let cells = terminal.backend().buffer().content.iter();
        cells.filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset).count()
    };
    let mut screen = Screen { error: Some("x".to_owned()), ..screen(Tab::Shards) };
    assert_eq!(colours(&screen), 0);
    screen.colours = true;
    assert!(colours(&screen) > 0);
}

#[test]
fn figures_of_the_first_snapshot_are_missing() {
    let mut snapshot = rpcrdma::stats::Snapshot::default();
    snapshot.shards.push(Default::default());
    snapshot.shards[0].stats = Some(ShardStats::default());
    let view = crate::top::model::Model::default().update(snapshot);
    let screen = Screen { view: Some(view), ..Screen::default() };
    assert_shows(
        &drawn(&screen, 40, 24),
        &["    0     -       -      -      -", "busy turns           -       -       -"],
    );
}
