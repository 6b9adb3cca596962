//! Grammars of requests: compiled off the threads that serve streams, within a time, once for all that have the same text.

use std::sync::Arc;
use std::time::Duration;

use drafthorse_control::Grammar;
use drafthorse_worker::grammar::Compiled;
use tokio::time::timeout;

use super::model::ServedModel;
use crate::error::{Result, ServerError};
use crate::params::Guided;

/// How long a request waits for its turn, and then for its grammar. What takes longer goes on until one of its own bounds ends it, and
/// counts among those that are compiled at once.
const MAX_COMPILE_TIME: Duration = Duration::from_secs(10);

impl ServedModel {
    /// The grammar compiled. Held until the answer ends, so that the rank finds it and need not compile it in a step.
    ///
    /// # Errors
    /// `BadInput` naming the field, with what is wrong with it and where; `CompilersBusy` if other requests' grammars leave it no turn;
    /// `Unsupported` if the model's tokens make no grammars.
    pub(super) async fn compile(&self, guided: &Guided) -> Result<Arc<Compiled>> {
        self.compile_within(guided, MAX_COMPILE_TIME).await
    }

    async fn compile_within(&self, guided: &Guided, most: Duration) -> Result<Arc<Compiled>> {
        let Some(grammars) = self.grammars() else {
            return Err(ServerError::unsupported_field(
                &guided.field,
                format!("{} with this model's tokenizer", guided.field),
            ));
        };
        if let Some(known) = grammars.known(&guided.grammar) {
            return Ok(known);
        }
        let turn = timeout(most, Arc::clone(&self.compiling).acquire_owned()).await;
        let turn = turn.map_err(|_| ServerError::CompilersBusy { seconds: most.as_secs() })?;
        let turn = turn.map_err(ServerError::internal)?;
        let (grammars, wanted) = (Arc::clone(grammars), guided.clone());
        let compiling = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let compile = |field: &str, grammar: &Grammar| {
                grammars.compile(grammar).map_err(|error| ServerError::bad_input(field, error.to_string()))
            };
            for (field, part) in &wanted.parts {
                compile(field, part)?;
            }
            compile(&wanted.field, &wanted.grammar)
        });
        let late = |_| ServerError::bad_input(&guided.field, format!("was not compiled within {} s", most.as_secs()));
        timeout(most, compiling).await.map_err(late)?.map_err(ServerError::internal)?
    }
}

#[cfg(test)]
mod tests {
    use super::super::scripted;
    use super::*;

    #[tokio::test]
    async fn a_good_grammar_is_not_blamed_for_those_that_are_compiled_before_it() {
        let model = scripted::model("ok", 1);
        let guided =
            Guided { field: "guided_regex".into(), grammar: Grammar::Regex("[ok]+".into()), parts: Vec::new() };
        let others = model.compiling.available_permits() as u32;
        let turns = Arc::clone(&model.compiling).acquire_many_owned(others).await.unwrap();
        let refused = model.compile_within(&guided, Duration::from_millis(20)).await.map(|_| ()).unwrap_err();
        assert!(matches!(refused, ServerError::CompilersBusy { .. }), "{refused}");
        drop(turns);
        assert!(model.compile(&guided).await.is_ok());
    }
}
