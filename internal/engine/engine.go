// Package engine is the inbox on a SQL database: the order of the statements, once, over a [Pool] that a driver's
// package supplies and the SQL text of a [dialect.Dialect].
//
// The pgx module, which is released by itself, is compiled against it, perhaps an older one against a newer
// engine. So it only grows: nothing exported is renamed, removed or given another meaning, and no interface that
// the module implements gets a method, without a new [Version].
package engine

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// Version rises when a package that was made for the engine before cannot work with this one.
const Version = 1

// Config is what an engine is made of.
type Config struct {
	Version int    // for which the caller was made
	Package string // the caller's, for the texts of errors
	Pool    Pool
	Dialect dialect.Dialect
	Table   string // as dialect.ParseTable takes it
}

// Engine is the [Contract] on one table. All its methods may be called by many goroutines.
type Engine struct {
	name    string
	pool    Pool
	driver  Driver
	dialect dialect.Dialect
	named   dialect.Table                 // as in the options
	located atomic.Pointer[dialect.Table] // with its schema
	checked atomic.Bool
}

// Contract is what an engine is to the middleware, the cleaner and operators.
type Contract interface {
	inbox.Repository
	inbox.Looker
	inbox.Records
}

var _ Contract = (*Engine)(nil)

// New returns an engine. It needs no server.
func New(config Config) (*Engine, error) {
	if config.Version != Version {
		return nil, fmt.Errorf("%s: this version of the package is made for engine %d, and the module github.com/devmappa/watermill-inbox has engine %d: upgrade the older one of the two",
			config.Package, config.Version, Version)
	}
	table, err := dialect.ParseTable(config.Table)
	if err != nil {
		return nil, err
	}
	return &Engine{name: config.Package, pool: config.Pool, driver: config.Pool.Driver(), dialect: config.Dialect, named: table}, nil
}

// Table is the table, with its schema once it has been located.
func (e *Engine) Table() dialect.Table {
	if located := e.located.Load(); located != nil {
		return *located
	}
	return e.named
}

// failed is an error of a method that is called outside of the messages' path.
func (e *Engine) failed(what string, err error) error {
	return fmt.Errorf("%s: cannot %s: %w", e.name, what, err)
}

// Claim implements [inbox.Repository].
func (e *Engine) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	if checker, ok := e.dialect.(dialect.KeyChecker); ok {
		if err := checker.CheckKey(params.Key); err != nil {
			return nil, nil, err
		}
	}
	if !e.checked.Load() {
		if err := e.Check(ctx); err != nil {
			return nil, nil, err
		}
	}
	for try := 1; ; try++ {
		t, record, err := e.claim(ctx, params.Key)
		if err == nil {
			return t, record, nil
		}
		// With its connection the transaction is gone, and nothing of it was committed: it is safe to begin
		// again, also when the statement may have reached the server.
		if !errors.Is(err, ErrConnectionLost) || ctx.Err() != nil || try == claimTries {
			return nil, nil, e.explain(ctx, params.Key, err)
		}
	}
}

// claimTries bounds how many connections a claim may lose before it fails. After a restart of the server a pool may
// hold several that it does not know to be dead.
const claimTries = 3

func (e *Engine) claim(ctx context.Context, key inbox.Key) (*Transaction, *inbox.Record, error) {
	t := &Transaction{engine: e, key: key}
	inserted, err := t.beginAndClaim(ctx)
	if err != nil {
		return nil, nil, err
	}
	record, err := t.decide(ctx, inserted)
	if err != nil {
		_ = t.Rollback() // the error says more
		return nil, nil, err
	}
	return t, record, nil
}

// explain lets the dialect say more about a claim's error. The claim's connection has been given back.
func (e *Engine) explain(ctx context.Context, key inbox.Key, err error) error {
	explainer, ok := e.dialect.(dialect.ClaimExplainer)
	if !ok {
		return err
	}
	return explainer.ExplainClaim(e.Table(), key, err, func(query dialect.Query) ([]string, error) { return e.Texts(ctx, e.pool, query) })
}

// Texts runs a query that selects one column of texts.
func (e *Engine) Texts(ctx context.Context, on Executor, query dialect.Query) ([]string, error) {
	var (
		texts []string
		text  string
	)
	err := on.Query(ctx, query, []any{&text}, func() error {
		texts = append(texts, text)
		return nil
	})
	return texts, err
}

// Short runs a transaction that is over soon.
func (e *Engine) Short(ctx context.Context, do func(Tx) error) error {
	tx, err := e.pool.BeginShort(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := do(tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// one runs a query that selects one row. It returns errNoRow if there is none.
func one(ctx context.Context, on Executor, query dialect.Query, destinations ...any) error {
	found := false
	err := on.Query(ctx, query, destinations, func() error {
		found = true
		return nil
	})
	if err == nil && !found {
		return errNoRow
	}
	return err
}

var errNoRow = errors.New("no row")
