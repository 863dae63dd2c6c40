//! The terminal: its keys and size, and the end of the program.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::EnterAlternateScreen;
use ratatui::layout::{Rect, Size};
use ratatui::{DefaultTerminal, TerminalOptions, Viewport};
use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::Args;
use super::draw::{Screen, Tab};
use super::model::Model;
use crate::command::{CommandError, ExitStatus, Outcome};
use crate::stats_socket;
use rpcrdma::stats::Snapshot;

/// Longest wait for a key between two checks for snapshots and signals.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Largest area that is drawn, in columns and rows. A terminal can claim 65535 of each, and each cell takes memory.
const MAX_AREA: Size = Size::new(1024, 512);

type SnapshotResult = Result<Snapshot, String>;

/// Shows intervals until a key or a signal quits.
pub(super) fn run(args: &Args) -> Outcome {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(failed)?;
    }
    // A separate thread reads snapshots, so that a slow server does not delay keys.
    let (sender, snapshots) = sync_channel(1);
    let (running, stopped) = sync_channel::<()>(0);
    let (path, interval) = (args.stats.clone(), args.interval);
    std::thread::Builder::new().name("snapshots".to_owned()).spawn(move || {
        read_snapshots(&path, interval, &sender, &stopped);
    })?;
    std::thread::Builder::new().name("hangup".to_owned()).spawn(exit_on_hangup)?;
    // The area is set before each draw.
    let options = TerminalOptions { viewport: Viewport::Fixed(Rect::default()) };
    let mut terminal = ratatui::try_init_with_options(options).map_err(failed)?;
    let shown = execute!(io::stdout(), EnterAlternateScreen)
        .and_then(|()| show(&mut terminal, args.interval, &snapshots, &stop));
    ratatui::restore();
    drop(running);
    shown.map(|()| ExitStatus::Success).map_err(failed)
}

fn failed(error: io::Error) -> CommandError {
    CommandError::Failed(format!("terminal: {error}; --once and --json do not need one"))
}

/// Reads snapshots until the screen ends, which drops the other end of `stopped`.
fn read_snapshots(path: &Path, interval: Duration, sender: &SyncSender<SnapshotResult>, stopped: &Receiver<()>) {
    while sender.send(stats_socket::read(path)).is_ok() {
        if stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

fn show(
    terminal: &mut DefaultTerminal,
    interval: Duration,
    snapshots: &Receiver<SnapshotResult>,
    stop: &AtomicBool,
) -> io::Result<()> {
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let mut screen = Screen { interval, colours: !no_colour, ..Screen::default() };
    let mut model = Model::default();
    let mut changed = true;
    while !stop.load(Ordering::Relaxed) {
        if let Ok(snapshot) = snapshots.try_recv() {
            match snapshot {
                Ok(snapshot) => screen.show(model.update(snapshot)),
                Err(error) => screen.error = Some(error),
            }
            changed = true;
        }
        if changed {
            let size = terminal.size()?;
            let area = Rect::new(0, 0, size.width.min(MAX_AREA.width), size.height.min(MAX_AREA.height));
            if terminal.get_frame().area() != area {
                terminal.resize(area)?;
            }
            terminal.draw(|frame| screen.draw(frame))?;
        }
        changed = event::poll(CHECK_INTERVAL)?;
        if changed && !handle_key(&mut screen, &event::read()?) {
            break;
        }
    }
    Ok(())
}

/// Handles a key. Returns false to quit. A new size needs no handling, because each draw uses the current size.
fn handle_key(screen: &mut Screen, event: &Event) -> bool {
    let Event::Key(key) = event else { return true };
    if key.kind == KeyEventKind::Release {
        return true;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('c') if control => return false,
        KeyCode::Char('s') => screen.select_tab(Tab::Shards),
        KeyCode::Char('p') => screen.select_tab(Tab::Procedures),
        KeyCode::Char('c') => screen.select_tab(Tab::Connections),
        KeyCode::Tab => {
            let at = Tab::ALL.iter().position(|tab| *tab == screen.tab).unwrap_or(0);
            screen.select_tab(Tab::ALL[(at + 1) % Tab::ALL.len()]);
        }
        KeyCode::Down | KeyCode::Char('j') => screen.move_selection(1),
        KeyCode::Up | KeyCode::Char('k') => screen.move_selection(-1),
        KeyCode::PageDown => screen.move_selection(10),
        KeyCode::PageUp => screen.move_selection(-10),
        _ => {}
    }
    true
}

/// Exits when the terminal is closed.
///
/// SIGHUP does not suffice: under nohup it is ignored, and the key reader retries endlessly at the end of its input.
fn exit_on_hangup() {
    let output = io::stdout();
    loop {
        let mut polled = [PollFd::new(&output, PollFlags::empty())];
        let hangup = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        if poll(&mut polled, None).is_ok() && polled[0].revents().intersects(hangup) {
            std::process::exit(0);
        }
    }
}
