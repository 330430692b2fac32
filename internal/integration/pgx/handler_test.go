package pgx_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/devmappa/watermill-inbox/inboxtest"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

// The kit for users' handlers: it passes a good handler and finds the bad ones.

func handlerOn(t *testing.T, db *database, options inboxpgx.Options, handle message.HandlerFunc) inboxtest.Handler {
	t.Helper()
	return inboxtest.Handler{
		Repository: db.repository(t, options),
		Handle:     handle,
		Message:    message.NewMessage("payment-7", []byte("payload")),
		State: func(ctx context.Context) (string, error) {
			effects, err := db.Effects(ctx)
			slices.Sort(effects)
			return strings.Join(effects, ", "), err
		},
	}
}

func TestHandlerGood(t *testing.T) {
	t.Parallel()
	for name, variant := range map[string]struct {
		options     inboxpgx.Options
		connections int32
	}{
		"default":         {connections: 4},
		"one connection":  {connections: 1},
		"REPEATABLE READ": {connections: 4, options: inboxpgx.Options{TxOptions: pgx.TxOptions{IsoLevel: pgx.RepeatableRead}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inboxtest.TestHandler(t, func(t *testing.T) inboxtest.Handler {
				db := newDatabase(t, func(config *pgxpool.Config) { config.MaxConns = variant.connections })
				return handlerOn(t, db, variant.options, func(msg *message.Message) ([]*message.Message, error) {
					booked := message.NewMessage(watermill.NewUUID(), []byte("booked"))
					return []*message.Message{booked}, write(msg.Context(), "payment")
				})
			})
		})
	}
}

func TestHandlerBad(t *testing.T) {
	t.Parallel()
	const around = "writes around its transaction"
	leak := func(db *database, msg *message.Message) error {
		if err := write(msg.Context(), "payment"); err != nil {
			return err
		}
		_, err := db.pool.Exec(msg.Context(), `INSERT INTO effects (effect) VALUES ('leaked')`)
		return err
	}
	for name, tc := range map[string]struct {
		connections int32
		handle      func(db *database, msg *message.Message) error
		want        []string
	}{
		"the pool":                   {4, leak, []string{"the handler returns an error after its work: the state has changed", around}},
		"the pool's only connection": {1, leak, []string{"no fault: the message is not acknowledged", "deadline exceeded", around}},
		"the commit": {4, func(_ *database, msg *message.Message) error {
			return errors.Join(write(msg.Context(), "payment"), handlerTx(msg.Context()).Commit(msg.Context()))
		}, []string{"no fault: the message is not acknowledged, and yet", "commits its transaction itself"}},
		"the rollback": {4, func(_ *database, msg *message.Message) error {
			return errors.Join(write(msg.Context(), "payment"), handlerTx(msg.Context()).Rollback(msg.Context()))
		}, []string{"no fault: the message is not acknowledged", "ended its transaction itself"}},
		"open rows": {4, func(_ *database, msg *message.Message) error {
			if err := write(msg.Context(), "payment"); err != nil {
				return err
			}
			_, err := handlerTx(msg.Context()).Query(msg.Context(), `SELECT effect FROM effects`)
			return err
		}, []string{"no fault: the message is not acknowledged", "left rows open"}},
		"a goroutine": {4, func(_ *database, msg *message.Message) error {
			tx := handlerTx(msg.Context())
			go func() {
				time.Sleep(100 * time.Millisecond)
				_, _ = tx.Exec(context.Background(), `INSERT INTO effects (effect) VALUES ('late')`)
			}()
			return write(msg.Context(), "payment")
		}, []string{"the commit comes late", "late, payment", "a goroutine that the handler left behind"}},
		"errors ignored": {4, func(_ *database, msg *message.Message) error {
			_ = write(msg.Context(), "payment")
			return nil
		}, []string{"the transaction is lost before the work: the handler returned nil", "ignores errors"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			failures := inboxtest.CheckHandler(t, func(t *testing.T) inboxtest.Handler {
				db := newDatabase(t, func(config *pgxpool.Config) { config.MaxConns = tc.connections })
				h := handlerOn(t, db, inboxpgx.Options{}, func(msg *message.Message) ([]*message.Message, error) { return nil, tc.handle(db, msg) })
				h.Timeout = 3 * time.Second
				return h
			})
			for _, failure := range failures {
				if !slices.ContainsFunc(tc.want, func(part string) bool { return !strings.Contains(failure.Error(), part) }) {
					return
				}
			}
			t.Errorf("none of %d failures has %q:\n%v", len(failures), tc.want, errors.Join(failures...))
		})
	}
}
