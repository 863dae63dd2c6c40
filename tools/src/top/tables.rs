//! Tables and shard details as text of a given width.
//!
//! The most important columns come first, and columns that do not fit are omitted.

use super::draw::Tab;
use super::model::{ConnectionRow, Figure, ProcedureRow, ShardRow, View};
use crate::units::{format_bytes, format_count, format_percent, format_span, format_time};

/// Characters between two columns.
const GAP: usize = 1;
/// Width of a block of details.
pub(super) const DETAIL: usize = 38;

/// Formats a number.
type Unit = fn(f64) -> String;

/// A column of a table with rows `R`.
struct Column<R> {
    head: &'static str,
    width: usize,
    /// Whether it contains words, which are left-aligned, rather than numbers, which are right-aligned.
    is_text: bool,
    cell: fn(&R) -> String,
}

impl<R> Column<R> {
    /// Pads or cuts a text to the column.
    fn pad(&self, text: &str) -> String {
        let width = self.width;
        // Peers choose their names, so control characters are replaced before they reach the terminal.
        let text: String = text.chars().map(|c| if c.is_control() { '?' } else { c }).take(width).collect();
        if self.is_text { format!("{text:<width$}") } else { format!("{text:>width$}") }
    }
}

const fn number<R>(head: &'static str, width: usize, cell: fn(&R) -> String) -> Column<R> {
    Column { head, width, is_text: false, cell }
}

const fn words<R>(head: &'static str, width: usize, cell: fn(&R) -> String) -> Column<R> {
    Column { head, width, is_text: true, cell }
}

fn figure(figure: Option<Figure>, unit: Unit) -> String {
    figure.map_or_else(|| "-".to_owned(), |figure| unit(figure.now))
}

fn fraction(used: u64, all: u64) -> String {
    format!("{}/{}", format_count(used as f64), format_count(all as f64))
}

const SHARDS: &[Column<ShardRow>] = &[
    number("shard", 5, |row| if row.answered { row.shard.to_string() } else { format!("{}?", row.shard) }),
    number("busy", 5, |row| figure(row.busy, format_percent)),
    number("calls/s", 7, |row| figure(row.calls, format_count)),
    number("p50", 6, |row| figure(row.p50, format_time)),
    number("p99", 6, |row| figure(row.p99, format_time)),
    number("faults", 6, |row| format_count(row.faults_total as f64)),
    number("waits/s", 7, |row| figure(row.memory_waits, format_count)),
    number("queue", 5, |row| format_count(row.worker_queue_depth as f64)),
    number("credits", 11, |row| fraction(row.credits_used, row.credits_granted)),
    number("batch", 5, |row| figure(row.batch, format_count)),
    number("conns", 5, |row| format_count(row.connections as f64)),
    number("posted", 6, |row| format_count(row.receives_posted as f64)),
    number("reserved", 8, |row| format_count(row.receives_reserved as f64)),
    number("lowest", 6, |row| format_count(row.receives_lowest as f64)),
    number("pool low", 11, |row| {
        row.pool_low.map_or_else(|| "-".to_owned(), |low| fraction(low.low_water as u64, low.count as u64))
    }),
    number("rwaits/s", 8, |row| figure(row.read_waits, format_count)),
    number("min c/s", 7, |row| row.calls.map_or_else(|| "-".to_owned(), |calls| format_count(calls.min))),
    number("max c/s", 7, |row| row.calls.map_or_else(|| "-".to_owned(), |calls| format_count(calls.max))),
    number("core", 4, |row| row.core.map_or_else(|| "-".to_owned(), |core| core.to_string())),
    words("address", 30, |row| row.address.clone()),
];

const PROCEDURES: &[Column<ProcedureRow>] = &[
    words("program", 13, |row| format!("{} v{}", row.program, row.version)),
    number("proc", 4, |row| row.procedure.to_string()),
    number("timed/s", 7, |row| figure(row.timed, format_count)),
    number("p99", 6, |row| figure(row.p99, format_time)),
    number("share", 5, |row| row.share.map_or_else(|| "-".to_owned(), format_percent)),
    number("p50", 6, |row| figure(row.p50, format_time)),
    number("in", 6, |row| row.bytes_in.map_or_else(|| "-".to_owned(), format_bytes)),
    number("out", 6, |row| row.bytes_out.map_or_else(|| "-".to_owned(), format_bytes)),
    number("refused/s", 9, |row| figure(row.refused, format_count)),
    number("refused", 7, |row| format_count(row.refused_total as f64)),
    number("timed", 7, |row| format_count(row.timed_total as f64)),
    number("min t/s", 7, |row| row.timed.map_or_else(|| "-".to_owned(), |timed| format_count(timed.min))),
    number("max t/s", 7, |row| row.timed.map_or_else(|| "-".to_owned(), |timed| format_count(timed.max))),
    number("max p99", 7, |row| row.p99.map_or_else(|| "-".to_owned(), |p99| format_time(p99.max))),
];

const CONNECTIONS: &[Column<ConnectionRow>] = &[
    words("peer", 18, |row| row.now.peer.clone()),
    number("v", 1, |row| row.now.version.to_string()),
    number("msgs/s", 6, |row| figure(row.messages, format_count)),
    number("calls", 5, |row| format_count(row.now.calls_under_way as f64)),
    number("credits", 11, |row| fraction(row.now.credits_used, row.now.credits_granted)),
    number("age", 6, |row| format_span(row.now.age)),
    number("silent", 6, |row| format_span(row.now.silent)),
    number("shard", 5, |row| row.shard.to_string()),
    words("stage", 11, |row| row.now.stage.clone()),
    number("messages", 8, |row| format_count(row.now.useful as f64)),
    number("sent", 6, |row| format_count(row.now.sent as f64)),
    number("Receives", 8, |row| format_count(row.now.receives_reserved as f64)),
    number("min m/s", 7, |row| row.messages.map_or_else(|| "-".to_owned(), |messages| format_count(messages.min))),
    number("max m/s", 7, |row| row.messages.map_or_else(|| "-".to_owned(), |messages| format_count(messages.max))),
    words("identity", 20, |row| row.now.identity.clone().unwrap_or_default()),
];

/// A table as text: its head, and a line per row.
pub(super) struct Table {
    pub(super) head: String,
    pub(super) lines: Vec<String>,
}

fn table<R>(columns: &[Column<R>], rows: &[R], width: usize) -> Table {
    let mut used = 0;
    let fitting = columns.iter().take_while(|column| {
        used += column.width + GAP;
        used <= width + GAP
    });
    let columns: Vec<_> = fitting.collect();
    let line = |cell: &dyn Fn(&Column<R>) -> String| {
        let cells: Vec<_> = columns.iter().map(|column| column.pad(&cell(column))).collect();
        cells.join(&" ".repeat(GAP))
    };
    let lines = rows.iter().map(|row| line(&|column| (column.cell)(row))).collect();
    Table { head: line(&|column| column.head.to_owned()), lines }
}

impl Tab {
    /// Returns the table of this tab.
    pub(super) fn table(self, view: &View, width: usize) -> Table {
        match self {
            Self::Shards => table(SHARDS, &view.shards, width),
            Self::Procedures => table(PROCEDURES, &view.procedures, width),
            Self::Connections => table(CONNECTIONS, &view.connections, width),
        }
    }
}

/// Returns all figures of a shard, the most important first, as lines of [`DETAIL`] characters.
pub(super) fn details(row: &ShardRow) -> Vec<String> {
    let rate = |(name, figure, unit): (&str, Option<Figure>, Unit)| {
        let cell = |value: fn(Figure) -> f64| figure.map_or_else(|| "-".to_owned(), |figure| unit(value(figure)));
        let (now, min, max) = (cell(|figure| figure.now), cell(|figure| figure.min), cell(|figure| figure.max));
        format!("{name:<14} {now:>7} {min:>7} {max:>7}")
    };
    let value = |(name, value): (&str, String)| {
        let line: String = format!("{name:<14} {value}").chars().take(DETAIL).collect();
        format!("{line:<DETAIL$}")
    };
    let low = row.pool_low.map_or_else(
        || "-".to_owned(),
        |low| format!("{}/{} of {}B", low.low_water, low.count, format_bytes(low.size as f64)),
    );
    let main_rates: [(_, _, Unit); 8] = [
        ("busy turns", row.busy, format_percent),
        ("calls/s", row.calls, format_count),
        ("p50", row.p50, format_time),
        ("p99", row.p99, format_time),
        ("mem. waits/s", row.memory_waits, format_count),
        ("backpressure/s", row.backpressure, format_count),
        ("faults/s", row.faults, format_count),
        ("batch", row.batch, format_count),
    ];
    let values = [
        ("credits", format!("{} used of {}", row.credits_used, row.credits_granted)),
        ("Receives", format!("{} for {} reserved", row.receives_posted, row.receives_reserved)),
        ("  lowest", row.receives_lowest.to_string()),
        ("pool lowest", low),
        ("worker queue", row.worker_queue_depth.to_string()),
        ("memory waits", row.memory_waits_total.to_string()),
        ("calls waiting", format!("{}, for {}", row.calls_waiting, format_time(row.longest_wait as f64).trim_start())),
        ("faults", row.faults_total.to_string()),
        ("connections", format!("{}, {} in all", row.connections, row.connections_made)),
    ];
    let further_rates: [(_, _, Unit); 8] = [
        ("read waits/s", row.read_waits, format_count),
        ("failed/s", row.calls_failed, format_count),
        ("pool empty/s", row.pool_empty, format_count),
        ("batch p99", row.batch_p99, format_count),
        ("received/s", row.messages_received, format_count),
        ("sent/s", row.messages_sent, format_count),
        ("doorbells/s", row.doorbells, format_count),
        ("sleeps/s", row.sleeps, format_count),
    ];
    let head = format!("{:<14} {:>7} {:>7} {:>7}", format!("shard {}", row.shard), "now", "min", "max");
    let lines = main_rates.into_iter().map(rate).chain(values.into_iter().map(value));
    let lines = lines.chain(further_rates.into_iter().map(rate));
    std::iter::once(head).chain(lines).collect()
}
