package pgx_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"sort"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	inbox "github.com/devmappa/watermill-inbox"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

type slowConn struct{ net.Conn }

func (c slowConn) Write(b []byte) (int, error) {
	time.Sleep(500 * time.Microsecond)
	return c.Conn.Write(b)
}

func TestZZBench(t *testing.T) {
	if os.Getenv("ZZ") == "" {
		t.Skip()
	}
	for _, slow := range []bool{true, false} {
		for _, workers := range []int{1, 4, 16} {
			db := newDatabase(t, func(c *pgxpool.Config) {
				c.MaxConns = 16
				if slow {
					c.ConnConfig.DialFunc = func(ctx context.Context, n, a string) (net.Conn, error) {
						conn, err := (&net.Dialer{}).DialContext(ctx, n, a)
						return slowConn{conn}, err
					}
				}
			})
			db.MustExec(t, `CREATE TABLE accounts (id int primary key, n int)`)
			db.MustExec(t, `INSERT INTO accounts SELECT generate_series(1,1000), 0`)
			repo := db.repository(t, inboxpgx.Options{})
			m, _ := inbox.NewMiddleware(repo, inbox.Options{Consumer: func(string) string { return "c" }})
			var p2 = m
			if os.Getenv("ZZ") == "2" {
				repo2, _ := inboxpgx.NewRepository(db.pool, inboxpgx.Options{TxOptions: pgx.TxOptions{BeginQuery: "begin; savepoint inbox", CommitQuery: "release savepoint inbox; commit"}})
				p2, _ = inbox.NewMiddleware(repo2, inbox.Options{Consumer: func(string) string { return "c" }})
			}
			effect := func(ctx context.Context, tx pgx.Tx, i int) error {
				_, err := tx.Exec(ctx, `UPDATE accounts SET n = n + 1 WHERE id = $1`, i%1000+1)
				return err
			}
			seq := 0
			run := func(inboxed bool) float64 {
				var wg sync.WaitGroup
				deadline := time.Now().Add(700 * time.Millisecond)
				counts := make([]int, workers)
				seq++
				start := time.Now()
				for w := range workers {
					wg.Add(1)
					go func() {
						defer wg.Done()
						for i := 0; time.Now().Before(deadline); i++ {
							n := w*97 + i
							msg := message.NewMessage(fmt.Sprintf("%08d-%d-%d", seq*1000000+i, w, seq), nil)
							var err error
							mm := p2
							if !inboxed { mm = m }
							if inboxed || os.Getenv("ZZ") == "2" {
								_, err = mm.Middleware(func(msg *message.Message) ([]*message.Message, error) {
									return nil, effect(msg.Context(), handlerTx(msg.Context()), n)
								})(msg)
							} else {
								err = pgx.BeginFunc(msg.Context(), db.pool, func(tx pgx.Tx) error { return effect(msg.Context(), tx, n) })
							}
							if err != nil {
								t.Error(err)
							}
							counts[w]++
						}
					}()
				}
				wg.Wait()
				total := 0
				for _, c := range counts {
					total += c
				}
				return float64(total) / time.Since(start).Seconds()
			}
			run(true)
			run(false)
			var ratios, plains, inboxes []float64
			for range 15 {
				p := run(false)
				i := run(true)
				ratios = append(ratios, i/p)
				plains = append(plains, p)
				inboxes = append(inboxes, i)
			}
			sort.Float64s(ratios)
			sort.Float64s(plains)
			sort.Float64s(inboxes)
			t.Logf("slow %v workers %d: plain %.0f/s inbox %.0f/s ratio %.3f (%.2f..%.2f)", slow, workers, plains[7], inboxes[7], ratios[7], ratios[2], ratios[12])
		}
	}
}
