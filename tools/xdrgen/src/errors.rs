//! Errors with their place in a file.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};

use crate::Source;

/// Most errors that are shown.
const MOST: usize = 20;

/// One error.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    /// It is in the placement file, not in the specification.
    in_placement: bool,
    at: Range<usize>,
    message: String,
    related: Option<(Range<usize>, String)>,
    help: Option<String>,
}

impl Problem {
    /// Marks another place of the same file.
    pub(crate) fn related(&mut self, at: &Range<usize>, label: impl Into<String>) {
        self.related = Some((at.clone(), label.into()));
    }

    /// Says what to do.
    pub(crate) fn help(&mut self, help: impl Into<String>) {
        self.help = Some(help.into());
    }
}

/// Errors found so far.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    /// Up to one more than [`MOST`].
    list: Vec<Problem>,
    count: usize,
    /// Warnings of the specification, and their places.
    warnings: Vec<(usize, String)>,
}

impl Problems {
    /// Adds a warning of the specification.
    pub(crate) fn warn(&mut self, at: &Range<usize>, message: String) {
        self.warnings.push((at.start, message));
    }

    /// The warnings: one line each, with file and line.
    pub(crate) fn warnings(&self, xdr: &Source) -> Vec<String> {
        let line = |at: usize| xdr.text[..at].matches('\n').count() + 1;
        self.warnings.iter().map(|(at, message)| format!("{}:{}: {message}", xdr.name, line(*at))).collect()
    }

    /// Adds an error in the specification.
    pub(crate) fn add(&mut self, at: &Range<usize>, message: impl Into<String>) -> &mut Problem {
        self.push(false, at, message.into())
    }

    /// Adds an error in the placement file.
    pub(crate) fn add_placement(&mut self, at: &Range<usize>, message: impl Into<String>) -> &mut Problem {
        self.push(true, at, message.into())
    }

    fn push(&mut self, in_placement: bool, at: &Range<usize>, message: String) -> &mut Problem {
        self.count += 1;
        self.list.truncate(MOST);
        self.list.push(Problem { in_placement, at: at.clone(), message, related: None, help: None });
        let last = self.list.len() - 1;
        &mut self.list[last]
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The errors in the order of the files.
    pub(crate) fn into_errors(mut self, xdr: &Source, placement: Option<&Source>) -> Errors {
        self.list.truncate(MOST);
        self.list.sort_by_key(|problem| (problem.in_placement, problem.at.start));
        Errors {
            files: [Some(xdr), placement].into_iter().flatten().cloned().collect(),
            warnings: self.warnings(xdr),
            list: self.list,
            count: self.count,
        }
    }
}

/// All errors of a specification and its placement file.
///
/// `Display` shows the first 20, each with its line and a mark below it.
#[derive(Clone, Debug)]
pub struct Errors {
    /// The specification, then the placement file.
    files: Vec<Source>,
    list: Vec<Problem>,
    count: usize,
    /// Perhaps their cause.
    warnings: Vec<String>,
}

impl std::error::Error for Errors {}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.list.iter().enumerate() {
            let source = &self.files[usize::from(problem.in_placement)];
            // The lines with marks alone: the renderer reads all that it is given.
            let related = problem.related.as_ref().map_or(&problem.at, |(at, _)| at);
            let start = problem.at.start.min(related.start);
            let start = source.text[..start].rfind('\n').map_or(0, |end| end + 1);
            let end = problem.at.end.max(related.end);
            let end = source.text[end..].find('\n').map_or(source.text.len(), |len| end + len);
            let within = |at: &Range<usize>| at.start - start..at.end - start;
            let mut snippet = Snippet::source(&source.text[start..end])
                .line_start(source.text[..start].matches('\n').count() + 1)
                .path(source.name.as_str())
                .annotation(AnnotationKind::Primary.span(within(&problem.at)));
            if let Some((at, label)) = &problem.related {
                snippet = snippet.annotation(AnnotationKind::Context.span(within(at)).label(label.as_str()));
            }
            let mut report = Level::ERROR.primary_title(problem.message.as_str()).element(snippet);
            if let Some(help) = &problem.help {
                report = report.element(Level::HELP.message(help.as_str()));
            }
            f.write_str(if i > 0 { "\n\n" } else { "" })?;
            f.write_str(&Renderer::plain().render(&[report]))?;
        }
        match self.count - self.list.len() {
            0 => {}
            more => write!(f, "\n\n{more} more errors")?,
        }
        self.warnings.iter().try_for_each(|warning| write!(f, "\n\nwarning: {warning}"))
    }
}
