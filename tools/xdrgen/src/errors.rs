//! Errors with their positions in files.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{Annotation, AnnotationKind, Level, Renderer, Snippet};

use crate::Source;
use crate::sources::Sources;

/// Maximum errors in a report.
const MAX_SHOWN: usize = 20;

/// An error.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    /// Whether the error is in the placement file rather than in the specification.
    in_placement: bool,
    at: Range<usize>,
    message: String,
    related: Option<(Range<usize>, String)>,
    help: Option<String>,
}

impl Problem {
    /// Marks another position of the specification.
    pub(crate) fn related(&mut self, at: &Range<usize>, label: impl Into<String>) {
        self.related = Some((at.clone(), label.into()));
    }

    /// Adds advice.
    pub(crate) fn help(&mut self, help: impl Into<String>) {
        self.help = Some(help.into());
    }
}

/// Errors found so far.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    /// The first [`MAX_SHOWN`] errors, and the last one.
    list: Vec<Problem>,
    count: usize,
    /// Warnings about the specification, and their positions.
    warnings: Vec<(Range<usize>, String)>,
}

impl Problems {
    /// Adds a warning about the specification.
    pub(crate) fn warn(&mut self, at: &Range<usize>, message: String) {
        self.warnings.push((at.clone(), message));
    }

    /// The warnings, one line each, with file and line.
    pub(crate) fn warnings(&self, xdr: &Sources) -> Vec<String> {
        let warning = |(at, message): &(Range<usize>, String)| {
            let (source, at) = xdr.locate(at);
            format!("{}:{}: {message}", source.name, source.text[..at.start].matches('\n').count() + 1)
        };
        self.warnings.iter().map(warning).collect()
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
        self.list.truncate(MAX_SHOWN);
        self.list.push(Problem { in_placement, at: at.clone(), message, related: None, help: None });
        let last = self.list.len() - 1;
        &mut self.list[last]
    }

    /// Whether there is no error.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the errors in the order of the files.
    pub(crate) fn into_errors(mut self, xdr: &Sources, placement: Option<&Source>) -> Errors {
        self.list.truncate(MAX_SHOWN);
        self.list.sort_by_key(|problem| (problem.in_placement, problem.at.start));
        Errors {
            xdr: xdr.clone(),
            placement: Box::new(placement.cloned().unwrap_or_default()),
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
    xdr: Sources,
    placement: Box<Source>,
    list: Vec<Problem>,
    count: usize,
    /// Warnings, which may name the cause of errors.
    warnings: Vec<String>,
}

impl std::error::Error for Errors {}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.list.iter().enumerate() {
            let locate = |at| if problem.in_placement { (&*self.placement, at) } else { self.xdr.locate(&at) };
            let (source, at) = locate(problem.at.clone());
            let mut marks = vec![(AnnotationKind::Primary, at, None)];
            let mut elsewhere = None;
            if let Some((at, label)) = &problem.related {
                let (file, at) = locate(at.clone());
                let mark = (AnnotationKind::Context, at, Some(label.as_str()));
                if std::ptr::eq(file, source) { marks.push(mark) } else { elsewhere = Some((file, mark)) }
            }
            let mut report = Level::ERROR.primary_title(problem.message.as_str()).element(snippet(source, &marks));
            if let Some((file, mark)) = elsewhere {
                report = report.element(snippet(file, &[mark]));
            }
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

/// A mark below a line, and its label.
type Mark<'a> = (AnnotationKind, Range<usize>, Option<&'a str>);

/// Returns the lines with marks. Other lines are omitted, because the renderer would read all of them.
fn snippet<'a>(source: &'a Source, marks: &[Mark<'a>]) -> Snippet<'a, Annotation<'a>> {
    let start = marks.iter().map(|(_, at, _)| at.start).min().unwrap_or(0);
    let start = source.text[..start].rfind('\n').map_or(0, |end| end + 1);
    let end = marks.iter().map(|(_, at, _)| at.end).max().unwrap_or(0);
    let end = source.text[end..].find('\n').map_or(source.text.len(), |len| end + len);
    let annotations = marks.iter().map(|(kind, at, label)| {
        let annotation = kind.span(at.start - start..at.end - start);
        if let Some(label) = label { annotation.label(*label) } else { annotation }
    });
    Snippet::source(&source.text[start..end])
        .line_start(source.text[..start].matches('\n').count() + 1)
        .path(source.name.as_str())
        .annotations(annotations)
}
