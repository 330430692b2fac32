package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// Transaction is an open transaction that holds a claim.
type Transaction struct {
	engine *Engine
	tx     Tx
	key    inbox.Key
}

var _ inbox.Transaction = (*Transaction)(nil)

// NewTransaction is a transaction without a claim, for unit tests of handlers.
func NewTransaction(tx Tx) *Transaction { return &Transaction{tx: tx} }

// Tx is the driver's side of the transaction.
func (t *Transaction) Tx() Tx { return t.tx }

// Exec runs a handler's statement in the transaction. By this method package outbox knows a transaction of ours.
func (t *Transaction) Exec(ctx context.Context, statement string, args ...any) (int64, error) {
	return t.tx.Exec(ctx, statement, args...)
}

// beginAndClaim opens the transaction, claims the key in it and returns the number of rows inserted. After
// an error there is no transaction.
func (t *Transaction) beginAndClaim(ctx context.Context) (inserted int64, err error) {
	e := t.engine
	opening, then := Opening{First: e.dialect.Claim(e.Table(), t.key)}, dialect.Query{}
	if begins, ok := e.dialect.(dialect.BeginClaimer); ok && e.driver.Fuses {
		opening.Guarded = begins.BeginClaim(e.Table(), t.key)
	}
	if !e.driver.NoticesEnd {
		savepoint := e.dialect.Savepoint()
		if len(savepoint.Args)+len(opening.First.Args) == 0 {
			opening.First.Text = savepoint.Text + "; " + opening.First.Text // in one message
		} else {
			opening.First, then = savepoint, opening.First
		}
	}
	if t.tx, inserted, err = e.pool.Begin(ctx, opening); err != nil {
		return 0, fmt.Errorf("cannot begin and claim: %w", err)
	}
	if then.Text == "" {
		return inserted, nil
	}
	if inserted, err = t.exec(ctx, then); err != nil {
		_ = t.Rollback() // the error says more
		return 0, fmt.Errorf("cannot claim: %w", err)
	}
	return inserted, nil
}

// decide returns nil when the claim is ours, or the record of the one who was before.
func (t *Transaction) decide(ctx context.Context, inserted int64) (*inbox.Record, error) {
	for attempt := 1; ; attempt++ {
		if inserted == 1 {
			return nil, nil
		}
		record, err := t.record(ctx)
		if !errors.Is(err, errNoRow) {
			return record, err
		}
		if attempt == 2 {
			return nil, inbox.ErrNoRecord
		}
		// A cleaner may have deleted the record between the claim and the look at it.
		if inserted, err = t.exec(ctx, t.engine.dialect.Claim(t.engine.Table(), t.key)); err != nil {
			return nil, fmt.Errorf("cannot claim: %w", err)
		}
	}
}

func (t *Transaction) record(ctx context.Context) (*inbox.Record, error) {
	record, err := t.engine.record(ctx, t.tx, t.key)
	if err != nil {
		return nil, fmt.Errorf("cannot read the record: %w", err)
	}
	return record, nil
}

// record returns errNoRow if there is none.
func (e *Engine) record(ctx context.Context, on Executor, key inbox.Key) (*inbox.Record, error) {
	var (
		processedAt int64
		produced    []byte
	)
	if err := one(ctx, on, e.dialect.Record(e.Table(), key), &processedAt, &produced); err != nil {
		return nil, err
	}
	return &inbox.Record{Key: key, ProcessedAt: time.UnixMicro(processedAt), Produced: produced}, nil
}

// Store implements [inbox.Transaction].
func (t *Transaction) Store(ctx context.Context, produced []byte) (time.Time, error) {
	var processedAt int64
	err := one(ctx, t.tx, t.engine.dialect.Store(t.engine.Table(), t.key, produced), &processedAt)
	switch {
	case errors.Is(err, errNoRow):
		return time.Time{}, fmt.Errorf("%w: the claim is gone from it", inbox.ErrTransactionBroken)
	case err != nil:
		return time.Time{}, t.broken(ctx, err, t.engine.dialect.IsTransactionOver)
	}
	return time.UnixMicro(processedAt), nil
}

// Commit implements [inbox.Transaction].
func (t *Transaction) Commit(ctx context.Context) error {
	if !t.engine.driver.NoticesEnd {
		if _, err := t.exec(ctx, t.engine.dialect.ReleaseSavepoint()); err != nil {
			return t.broken(ctx, err, t.engine.dialect.IsTransactionOver)
		}
	}
	if err := t.tx.Commit(ctx); err != nil {
		return t.broken(ctx, err, t.engine.dialect.IsBrokenByHandler)
	}
	return nil
}

// Rollback implements [inbox.Transaction]. There is nothing to do when the database has rolled back by itself.
func (t *Transaction) Rollback() error {
	if err := t.tx.Rollback(); err != nil && !t.engine.dialect.IsTransactionOver(err) {
		return err
	}
	return nil
}

// broken tells the handler's faults from the server's. With a live context only the handler can have ended
// the transaction.
func (t *Transaction) broken(ctx context.Context, err error, byHandler func(error) bool) error {
	if ctx.Err() == nil && (t.tx.IsBroken(err) || byHandler(err)) {
		return fmt.Errorf("%w: %w", inbox.ErrTransactionBroken, err)
	}
	return err
}

func (t *Transaction) exec(ctx context.Context, query dialect.Query) (int64, error) {
	return t.tx.Exec(ctx, query.Text, query.Args...)
}
