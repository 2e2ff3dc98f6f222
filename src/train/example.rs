//! Examples to train on.

/// A text to train on: its tokens, and which of them the model is to learn to predict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    tokens: Vec<u32>,
    /// One entry per token; the first is never predicted.
    learnt: Vec<bool>,
}

impl Example {
    /// Tokens, with for each of them whether it is to be learnt; the first has nothing before it that could predict it.
    ///
    /// # Panics
    /// If there are not as many flags as tokens.
    pub fn new(tokens: Vec<u32>, mut learnt: Vec<bool>) -> Example {
        assert_eq!(tokens.len(), learnt.len(), "a flag per token");
        if let Some(first) = learnt.first_mut() {
            *first = false;
        }
        Example { tokens, learnt }
    }

    /// A text of which every token is to be learnt.
    pub fn text(tokens: &[u32]) -> Example {
        Example::new(tokens.to_vec(), vec![true; tokens.len()])
    }

    /// A text cut into examples of at most `n` tokens, each of which begins with the last token of the one before, so that
    /// every token but the first is learnt once.
    ///
    /// # Panics
    /// If `n` is less than 2.
    pub fn pieces(tokens: &[u32], n: usize) -> Vec<Example> {
        assert!(n >= 2, "an example needs a token to predict from and one to predict");
        let starts = (0..tokens.len().saturating_sub(1)).step_by(n - 1);
        starts.map(|start| Example::text(&tokens[start..(start + n).min(tokens.len())])).collect()
    }

    /// A prompt that is given and a completion to learn.
    pub fn completion(prompt: &[u32], completion: &[u32]) -> Example {
        let learnt = (0..prompt.len() + completion.len()).map(|i| i >= prompt.len()).collect();
        Example::new([prompt, completion].concat(), learnt)
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Whether each token is to be learnt.
    pub fn learnt(&self) -> &[bool] {
        &self.learnt
    }

    /// Number of tokens to be learnt.
    pub fn n_learnt(&self) -> usize {
        self.learnt.iter().filter(|learnt| **learnt).count()
    }
}
