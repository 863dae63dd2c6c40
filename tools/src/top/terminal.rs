//! The screen: its keys, its size and its end.

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
use crate::command::{CommandError, Ended, Outcome};
use crate::feed;
use rpcrdma::stats::Snapshot;

/// Longest wait for a key between two checks for snapshots and signals.
const LOOK: Duration = Duration::from_millis(100);

/// Largest area that is drawn, in columns and rows. A terminal can claim 65535 of both, and each cell takes memory.
const LARGEST: Size = Size::new(1024, 512);

type News = Result<Snapshot, String>;

/// Shows intervals until it is told to quit.
pub(super) fn run(args: &Args) -> Outcome {
    let ends = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&ends)).map_err(failed)?;
    }
    // A separate thread reads: a slow server delays no key.
    let (say, news) = sync_channel(1);
    let (goes_on, gone) = sync_channel::<()>(0);
    let (path, interval) = (args.stats.clone(), args.interval);
    std::thread::Builder::new().name("feed".to_owned()).spawn(move || watch(&path, interval, &say, &gone))?;
    std::thread::Builder::new().name("hangup".to_owned()).spawn(end_with_terminal)?;
    // Each draw sets the area.
    let options = TerminalOptions { viewport: Viewport::Fixed(Rect::default()) };
    let mut terminal = ratatui::try_init_with_options(options).map_err(failed)?;
    let shown =
        execute!(io::stdout(), EnterAlternateScreen).and_then(|()| show(&mut terminal, args.interval, &news, &ends));
    ratatui::restore();
    drop(goes_on);
    shown.map(|()| Ended::Well).map_err(failed)
}

fn failed(error: io::Error) -> CommandError {
    CommandError::Failed(format!("the terminal: {error}; --once and --json need none"))
}

/// Reads snapshots until the receiver is gone.
fn watch(path: &Path, interval: Duration, say: &SyncSender<News>, gone: &Receiver<()>) {
    while say.send(feed::read(path)).is_ok() {
        if gone.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

fn show(
    terminal: &mut DefaultTerminal,
    interval: Duration,
    news: &Receiver<News>,
    ends: &AtomicBool,
) -> io::Result<()> {
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let mut screen = Screen { interval, colours: !no_colour, ..Screen::default() };
    let mut model = Model::default();
    let mut changed = true;
    while !ends.load(Ordering::Relaxed) {
        if let Ok(news) = news.try_recv() {
            match news {
                Ok(snapshot) => screen.show(model.take(snapshot)),
                Err(error) => screen.gone = Some(error),
            }
            changed = true;
        }
        if changed {
            let size = terminal.size()?;
            let area = Rect::new(0, 0, size.width.min(LARGEST.width), size.height.min(LARGEST.height));
            if terminal.get_frame().area() != area {
                terminal.resize(area)?;
            }
            terminal.draw(|frame| screen.draw(frame))?;
        }
        changed = event::poll(LOOK)?;
        if changed && !handle(&mut screen, &event::read()?) {
            break;
        }
    }
    Ok(())
}

/// Handles a key; returns false to quit. A new size needs no handling, as each draw uses the current one.
fn handle(screen: &mut Screen, event: &Event) -> bool {
    let Event::Key(key) = event else { return true };
    if key.kind == KeyEventKind::Release {
        return true;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('c') if control => return false,
        KeyCode::Char('s') => screen.turn_to(Tab::Shards),
        KeyCode::Char('p') => screen.turn_to(Tab::Procedures),
        KeyCode::Char('c') => screen.turn_to(Tab::Connections),
        KeyCode::Tab => {
            let at = Tab::ALL.iter().position(|tab| *tab == screen.tab).unwrap_or(0);
            screen.turn_to(Tab::ALL[(at + 1) % Tab::ALL.len()]);
        }
        KeyCode::Down | KeyCode::Char('j') => screen.select(1),
        KeyCode::Up | KeyCode::Char('k') => screen.select(-1),
        KeyCode::PageDown => screen.select(10),
        KeyCode::PageUp => screen.select(-10),
        _ => {}
    }
    true
}

/// Exits when the terminal is closed. Under nohup there is no SIGHUP, and the key reader retries endlessly at the end
/// of its input.
fn end_with_terminal() {
    let output = io::stdout();
    loop {
        let mut polled = [PollFd::new(&output, PollFlags::empty())];
        let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        if poll(&mut polled, None).is_ok() && polled[0].revents().intersects(gone) {
            std::process::exit(0);
        }
    }
}
