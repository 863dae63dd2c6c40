//! Draws the screen.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::model::View;
use super::tables::{self, DETAIL, Table};
use crate::units::format_span;

/// A table of the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tab {
    #[default]
    Shards,
    Procedures,
    Connections,
}

impl Tab {
    pub(super) const ALL: [Self; 3] = [Self::Shards, Self::Procedures, Self::Connections];

    fn name(self) -> &'static str {
        match self {
            Self::Shards => "shards",
            Self::Procedures => "procedures",
            Self::Connections => "connections",
        }
    }

    fn rows(self, view: &View) -> usize {
        match self {
            Self::Shards => view.shards.len(),
            Self::Procedures => view.procedures.len(),
            Self::Connections => view.connections.len(),
        }
    }
}

/// State of the screen.
#[derive(Debug, Default)]
pub(super) struct Screen {
    /// The last interval, if there is one.
    pub(super) view: Option<View>,
    /// Why the last snapshot could not be read.
    pub(super) error: Option<String>,
    pub(super) interval: Duration,
    pub(super) tab: Tab,
    /// The selected row. Details of a selected shard are shown below the table.
    pub(super) selected: usize,
    pub(super) colours: bool,
}

impl Screen {
    /// Shows a new interval.
    pub(super) fn show(&mut self, view: View) {
        (self.view, self.error) = (Some(view), None);
        self.move_selection(0);
    }

    /// Moves the selection by a number of rows.
    pub(super) fn move_selection(&mut self, by: isize) {
        let rows = self.view.as_ref().map_or(0, |view| self.tab.rows(view));
        self.selected = self.selected.saturating_add_signed(by).min(rows.saturating_sub(1));
    }

    /// Shows another table.
    pub(super) fn select_tab(&mut self, tab: Tab) {
        (self.tab, self.selected) = (tab, 0);
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let area = frame.area();
        let rows = [Constraint::Length(1), Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)];
        let [title, tabs, body, keys] = Layout::vertical(rows).areas(area);
        frame.render_widget(self.title(), title);
        frame.render_widget(self.tabs(area.width.into()), tabs);
        frame.render_widget(Line::raw("s p c: tables  \u{2191}\u{2193}: rows  q: quit"), keys);
        let Some(view) = &self.view else { return };
        let table = self.tab.table(view, area.width.into());
        let details = match self.tab {
            Tab::Shards => view.shards.get(self.selected).map(tables::details).unwrap_or_default(),
            _ => Vec::new(),
        };
        // If details follow, the table takes at most half of the area.
        let wanted = 1 + table.lines.len();
        let height = if details.is_empty() { wanted } else { wanted.min(usize::from(body.height) / 2).max(2) };
        let rows =
            [Constraint::Length(height.try_into().unwrap_or(u16::MAX)), Constraint::Length(1), Constraint::Fill(1)];
        let [above, _, below] = Layout::vertical(rows).areas(body);
        self.draw_table(frame, table, above);
        if !details.is_empty() {
            self.draw_details(frame, &details, below);
        } else if view.connections_omitted > 0 && self.tab == Tab::Connections {
            let line = format!("and {} more connections, which the snapshot omits", view.connections_omitted);
            frame.render_widget(Line::raw(line), below);
        }
    }

    fn title(&self) -> Line<'static> {
        if let Some(error) = &self.error {
            return Line::styled(format!("no snapshot: {error}; retrying"), self.alarm_style());
        }
        let Some(view) = &self.view else { return Line::raw("rpcrdma top: waiting for the first snapshot") };
        let seconds = self.interval.as_secs_f64();
        let uptime = format_span(view.uptime);
        Line::styled(format!("rpcrdma top  pid {}  up {uptime}  every {seconds} s", view.pid), Modifier::BOLD)
    }

    /// Returns the names of the tables, or on a narrow screen only the name of the shown table.
    fn tabs(&self, width: usize) -> Line<'static> {
        let mut spans = Vec::new();
        for tab in Tab::ALL {
            let rows = self.view.as_ref().map_or(0, |view| tab.rows(view));
            let style = if tab == self.tab { Modifier::REVERSED.into() } else { Style::default() };
            if tab == self.tab || width > 50 {
                spans.extend([Span::styled(format!(" {} {} ", rows, tab.name()), style), Span::raw(" ")]);
            }
        }
        Line::from(spans)
    }

    fn draw_table(&self, frame: &mut Frame<'_>, table: Table, area: Rect) {
        let head = Line::styled(table.head, self.heading_style());
        let shown = usize::from(area.height).saturating_sub(1);
        // Keeps the selected row visible.
        let first = self.selected.saturating_sub(shown.saturating_sub(1));
        let highlight_selected = |(row, line)| {
            let style = if row == self.selected { Modifier::REVERSED.into() } else { Style::default() };
            Line::styled(line, style)
        };
        let lines = table.lines.into_iter().enumerate().skip(first).take(shown).map(highlight_selected);
        frame.render_widget(Paragraph::new(std::iter::once(head).chain(lines).collect::<Vec<_>>()), area);
    }

    /// Draws details in as many adjacent blocks as fit.
    fn draw_details(&self, frame: &mut Frame<'_>, details: &[String], area: Rect) {
        let (head, rest) = details.split_first().map_or(("", &[][..]), |(head, rest)| (head.as_str(), rest));
        let blocks = ((usize::from(area.width) + 2) / (DETAIL + 2)).max(1);
        let height = rest.len().div_ceil(blocks).max(1);
        let mut lines = vec![Line::styled(head.to_owned(), self.heading_style())];
        for row in 0..height {
            let cells: Vec<_> = rest.iter().skip(row).step_by(height).map(String::as_str).collect();
            lines.push(Line::raw(cells.join("  ")));
        }
        frame.render_widget(Paragraph::new(lines), area);
    }

    fn heading_style(&self) -> Style {
        if self.colours { Style::new().fg(Color::Cyan) } else { Modifier::BOLD.into() }
    }

    fn alarm_style(&self) -> Style {
        if self.colours { Style::new().fg(Color::White).bg(Color::Red) } else { Modifier::REVERSED.into() }
    }
}

#[cfg(test)]
mod tests;
