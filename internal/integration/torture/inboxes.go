//go:build unix

package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// ours is the inbox under test. All others are wrong on purpose, as people write them by hand: a checker
// that lets one of them pass proves nothing.
const ours = "watermill-inbox"

const (
	checkThenInsert   = "check-then-insert"
	claimBeforeEffect = "claim-committed-before-the-effect"
	claimAfterEffect  = "claim-after-the-effect"
	keyWithout        = "key-without-the-consumer"
	notStored         = "produced-messages-not-stored"
	noBackOff         = "no-back-off-and-no-relay"
)

var wrongInboxes = []string{checkThenInsert, claimBeforeEffect, claimAfterEffect, keyWithout, notStored, noBackOff}

// inboxUnderTest is what a worker puts into its router, and what it runs next to it.
type inboxUnderTest struct {
	addTo func(*message.Router) error
	relay string // the consumer of a relay; "" for none
	close func(context.Context) error
}

const publishBackOff = 2 * time.Second

func newInbox(name string, s store, r *reaper, logger watermill.LoggerAdapter) (inboxUnderTest, error) {
	relay, options := bookings, inbox.Options{PublishBackOff: publishBackOff, Logger: logger}
	repository := inbox.Repository(inboxtest.NewFaultRepository(s.repository(), r.fault))
	switch name {
	case ours:
	case keyWithout:
		relay = "everybody"
		options.Consumer = func(string) string { return relay }
	case notStored:
		repository = forgetful{repository}
	case noBackOff:
		relay, options.PublishBackOff = "", 1
	default:
		plain, ok := s.(*sqlStore)
		if !ok {
			return inboxUnderTest{}, fmt.Errorf("%s needs database/sql", name)
		}
		wrong := handWritten{db: plain.db, reaper: r}
		flow, ok := map[string]func(context.Context, string, string, func(*sql.Tx) error) error{
			checkThenInsert:   wrong.checkThenInsert,
			claimBeforeEffect: wrong.claimBeforeEffect,
			claimAfterEffect:  wrong.claimAfterEffect,
		}[name]
		if !ok {
			return inboxUnderTest{}, fmt.Errorf("there is no inbox %q", name)
		}
		return inboxUnderTest{
			addTo: func(router *message.Router) error {
				attempts := retry
				attempts.ShouldRetry, attempts.ResetContextOnRetry = inbox.ShouldRetry, true
				router.AddMiddleware(attempts.Middleware, middleware.Timeout(timeout), middleware.Recoverer, middlewareOf(flow))
				return nil
			},
			close: func(context.Context) error { return nil },
		}, nil
	}
	once, err := inbox.NewMiddleware(repository, options)
	if err != nil {
		return inboxUnderTest{}, err
	}
	return inboxUnderTest{
		addTo: func(router *message.Router) error {
			return once.AddTo(router, inbox.RouterOptions{
				PoisonPublisher: poisonPublisher{}, PoisonTopic: "poison", Retry: retry, Timeout: timeout,
			})
		},
		relay: relay,
		close: once.Close,
	}, nil
}

// What is around every inbox.
var retry = middleware.Retry{MaxRetries: 3, InitialInterval: 100 * time.Millisecond, MaxInterval: time.Second, Multiplier: 2}

const timeout = 30 * time.Second

// poisonPublisher tells the driver, to whom every poisoned message is a violation: they are all good.
type poisonPublisher struct{}

func (poisonPublisher) Publish(_ string, messages ...*message.Message) error {
	for _, msg := range messages {
		say("poisoned", fmt.Sprintf("%s in %s: %q", msg.UUID,
			msg.Metadata.Get(middleware.PoisonedHandlerKey), msg.Metadata.Get(middleware.ReasonForPoisonedKey)))
	}
	return nil
}

func (poisonPublisher) Close() error { return nil }

// forgetful commits without the produced messages: a crash before the publish loses them.
type forgetful struct{ inbox.Repository }

func (f forgetful) Claim(ctx context.Context, params inbox.ClaimParams) (inbox.Transaction, *inbox.Record, error) {
	transaction, record, err := f.Repository.Claim(ctx, params)
	if transaction == nil {
		return nil, record, err
	}
	return forgetfulTransaction{transaction}, record, err
}

type forgetfulTransaction struct{ inbox.Transaction }

func (t forgetfulTransaction) Unwrap() inbox.Transaction { return t.Transaction }

func (t forgetfulTransaction) Store(context.Context, inbox.StoreParams) (time.Time, error) {
	return time.Now(), nil
}

// handWritten has the flows that go wrong. Its records are in the inbox's table.
type handWritten struct {
	db     *sql.DB
	reaper *reaper
}

var errDuplicate = errors.New("duplicate")

// checkThenInsert looks first: two copies at once both see nothing.
func (h handWritten) checkThenInsert(ctx context.Context, consumer, id string, effect func(*sql.Tx) error) error {
	return h.inTransaction(ctx, func(tx *sql.Tx) error {
		if err := refuseKnown(ctx, tx, consumer, id); err != nil {
			return err
		}
		if err := effect(tx); err != nil {
			return err
		}
		_, err := claim(ctx, tx, consumer, id)
		return err
	})
}

// claimBeforeEffect commits the claim first: a crash after it loses the effect.
func (h handWritten) claimBeforeEffect(ctx context.Context, consumer, id string, effect func(*sql.Tx) error) error {
	claimed, err := claim(ctx, h.db, consumer, id)
	if err != nil {
		return err
	}
	if !claimed {
		return errDuplicate
	}
	h.reaper.pass(string(inboxtest.AfterClaim))
	return h.inTransaction(ctx, effect)
}

// claimAfterEffect commits the effect first: a crash after it, or a copy at once, doubles it.
func (h handWritten) claimAfterEffect(ctx context.Context, consumer, id string, effect func(*sql.Tx) error) error {
	if err := refuseKnown(ctx, h.db, consumer, id); err != nil {
		return err
	}
	if err := h.inTransaction(ctx, effect); err != nil {
		return err
	}
	h.reaper.pass(string(inboxtest.BeforeClaim))
	_, err := claim(ctx, h.db, consumer, id)
	return err
}

func (h handWritten) inTransaction(ctx context.Context, do func(*sql.Tx) error) error {
	tx, err := h.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := do(tx); err != nil {
		return err
	}
	h.reaper.pass(string(inboxtest.BeforeCommit))
	if err := tx.Commit(); err != nil {
		return err
	}
	h.reaper.pass(string(inboxtest.AfterCommit))
	return nil
}

type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func refuseKnown(ctx context.Context, q querier, consumer, id string) error {
	var count int
	err := q.QueryRowContext(ctx, `SELECT count(*) FROM watermill_inbox WHERE consumer = $1 AND message_id = $2`, consumer, id).Scan(&count)
	if err == nil && count > 0 {
		return errDuplicate
	}
	return err
}

func claim(ctx context.Context, q querier, consumer, id string) (bool, error) {
	result, err := q.ExecContext(ctx,
		`INSERT INTO watermill_inbox (consumer, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`, consumer, id)
	if err != nil {
		return false, err
	}
	inserted, err := result.RowsAffected()
	return inserted == 1, err
}

// middlewareOf puts a flow around a handler.
func middlewareOf(flow func(ctx context.Context, consumer, id string, effect func(*sql.Tx) error) error) message.HandlerMiddleware {
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) (produced []*message.Message, err error) {
			ctx := msg.Context()
			defer msg.SetContext(ctx)
			err = flow(ctx, message.HandlerNameFromCtx(ctx), msg.UUID, func(tx *sql.Tx) error {
				msg.SetContext(inboxsql.ContextWithTx(ctx, tx))
				produced, err = h(msg)
				return err
			})
			if errors.Is(err, errDuplicate) {
				say("inbox", "duplicate")
				return nil, nil
			}
			if err == nil {
				say("inbox", "processed")
			}
			return produced, err
		}
	}
}
