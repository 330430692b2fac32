package engine

import (
	"context"
	"errors"
	"fmt"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// InitializeSchema creates what is missing, and then checks it. Nothing is created alongside a table that exists: a
// second one, in another schema of the search path, would know of no message that was processed.
func (e *Engine) InitializeSchema(ctx context.Context) error {
	err := e.Check(ctx)
	var faults *inbox.CheckError
	if !errors.As(err, &faults) {
		return err // nil, or it is not known whether there is a table
	}
	if err := e.Create(ctx); err != nil {
		return err
	}
	return e.Check(ctx)
}

// Create creates what is missing.
func (e *Engine) Create(ctx context.Context) error {
	err := e.Short(ctx, func(tx Tx) error {
		if lock := e.dialect.SchemaLock(); lock.Text != "" {
			if _, err := tx.Exec(ctx, lock.Text, lock.Args...); err != nil {
				return err
			}
		}
		if err := e.locateOn(ctx, tx); err != nil { // another instance may have been faster
			return err
		}
		for _, query := range e.dialect.Schema(e.Table()) {
			if _, err := tx.Exec(ctx, query.Text, query.Args...); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		err = e.locate(ctx)
	}
	if err != nil {
		return e.failed("initialize the schema", err)
	}
	return nil
}

// Check returns a [*inbox.CheckError] that names all faults, or the error of the query.
func (e *Engine) Check(ctx context.Context) error {
	if err := e.locate(ctx); err != nil {
		return e.failed("check the schema", err)
	}
	if err := e.CheckBy(ctx, e.dialect.Check(e.Table())); err != nil {
		return err
	}
	if checker, ok := e.dialect.(dialect.WriteChecker); ok {
		query := checker.CheckWrite(e.Table())
		if _, err := e.pool.Exec(ctx, query.Text, query.Args...); checker.IsReadOnly(err) { // or somebody else writes, which is well
			return &inbox.CheckError{Table: e.Table().String(), Problems: []string{"the database is read-only"}}
		}
	}
	e.checked.Store(true)
	return nil
}

// CheckBy is Check by another query.
func (e *Engine) CheckBy(ctx context.Context, query dialect.Query) error {
	var (
		problems []string
		problem  string
	)
	err := e.pool.Query(ctx, query, []any{&problem}, func() error {
		problems = append(problems, problem)
		if problem == dialect.ReadOnly {
			return dialect.ErrReadOnly // for the pool, which closes the connection
		}
		return nil
	})
	if err != nil && !errors.Is(err, dialect.ErrReadOnly) {
		return e.failed("check the schema", err)
	}
	if len(problems) > 0 {
		return &inbox.CheckError{Table: e.Table().String(), Problems: problems}
	}
	return nil
}

// Locate looks once in which schema the table is. What was found is used for ever, whatever handlers do to the
// search path.
func (e *Engine) Locate(ctx context.Context) error {
	if err := e.locate(ctx); err != nil {
		return e.failed("look for the table", err)
	}
	return nil
}

func (e *Engine) locate(ctx context.Context) error { return e.locateOn(ctx, e.pool) }

func (e *Engine) locateOn(ctx context.Context, on Executor) error {
	query := e.dialect.Locate(e.named)
	if query.Text == "" || e.named.Schema() != "" || e.located.Load() != nil {
		return nil
	}
	var (
		schema string
		usable int
		done   bool
	)
	return on.Query(ctx, query, []any{&schema, &usable}, func() error {
		switch table := e.named.In(schema); {
		case done:
		case usable == 0:
			return fmt.Errorf("there is a table %s in the search path, and the role has no privilege USAGE on its schema", table)
		default:
			e.located.Store(&table)
			done = true
		}
		return nil
	})
}
