// Package engine is the inbox on a SQL database: the order of the statements, once, over a [Pool] that a driver's
// package supplies and the SQL text of a [dialect.Dialect].
//
// The pgx module, which is released by itself, is compiled against it, perhaps an older one against a newer
// engine. So it only grows: nothing exported is renamed, removed or given another meaning, and no interface that
// the module implements gets a method, without a new [Version].
package engine

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

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
	inbox.Adviser
}

var (
	_ Contract    = (*Engine)(nil)
	_ sql.Scanner = (*produced)(nil)
)

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
	for lost, gone := 0, 0; ; {
		t, record, err := e.claim(ctx, params.Key)
		switch {
		case err == nil && t != nil:
			return t, nil, nil
		case err == nil:
			return nil, record, nil
		case errors.Is(err, ErrConnectionLost) && ctx.Err() == nil && lost < maxLost:
			// With its connection the transaction is gone, and nothing of it was committed: it is safe to begin
			// again, also when the statement may have reached the server.
			lost++
		case errors.Is(err, inbox.ErrNoRecord) && gone < 1:
			gone++ // a cleaner may have deleted the record between the claim and the look at it
		default:
			return nil, nil, e.explain(ctx, params.Key, err)
		}
	}
}

// maxLost bounds how many connections a claim may lose before it fails. After a restart of the server a pool may
// hold several that it does not know to be dead.
const maxLost = 2

// claim returns the transaction when the claim is ours, or the record of the one who was before. That one is read
// after the rollback, by which all is gone that this transaction has done itself, through a trigger for example: what
// is seen then was committed by somebody else.
func (e *Engine) claim(ctx context.Context, key inbox.Key) (*Transaction, *inbox.Record, error) {
	t := &Transaction{engine: e, key: key, ctx: ctx}
	inserted, err := t.beginAndClaim(ctx)
	if err != nil {
		return nil, nil, err
	}
	if inserted == 1 {
		return t, nil, nil
	}
	if err := t.tx.Rollback(); err != nil {
		return nil, nil, fmt.Errorf("cannot roll back: %w", err)
	}
	record, err := e.record(ctx, e.pool, key)
	switch {
	case errors.Is(err, errNoRow):
		return nil, nil, inbox.ErrNoRecord
	case err != nil:
		return nil, nil, fmt.Errorf("cannot read the record: %w", err)
	}
	return nil, record, nil
}

// record returns errNoRow if there is none.
func (e *Engine) record(ctx context.Context, on Executor, key inbox.Key) (*inbox.Record, error) {
	var (
		processedAt int64
		topic       string
		stored      = produced{decode: e.dialect.DecodeProduced}
	)
	if err := one(ctx, on, e.dialect.Record(e.Table(), key), &processedAt, &topic, &stored); err != nil {
		return nil, err
	}
	return &inbox.Record{Key: key, ProcessedAt: time.UnixMicro(processedAt), Topic: topic, Produced: stored.bytes}, nil
}

// produced is a destination for what is selected as produced. Decoding it here spares a copy.
type produced struct {
	decode func(any) ([]byte, error)
	bytes  []byte
}

// Scan implements [sql.Scanner].
func (p *produced) Scan(value any) (err error) {
	p.bytes, err = p.decode(value)
	return err
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
	return tx.Commit(ctx, dialect.Query{})
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
